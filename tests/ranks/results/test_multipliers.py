"""``lr_mults`` and ``wd_mults`` become parameter groups of Megatron's, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.installed import lacks
from support.models.gpt import (
    distributed_optimizers,
    error_of_building,
    held,
    inner_optimizers,
    start,
    stepped,
)
from support.ranks import run
from support.runs.cases import Case, Topology

FASTER = ("*.linear_fc2.*", "decoder.layers.1.*", "embedding.*")
# In turn: by Megatron's own means, and by the plugin's settings.
BY_MEGATRON = Case(steps=3, faster=FASTER)
BY_US = replace(
    BY_MEGATRON,
    faster=(),
    muon=(
        ("lr_mults", (("*", 7.0), ("*", 1.0), *((pattern, 3.0) for pattern in FASTER))),
        ("wd_mults", tuple((pattern, 0.5) for pattern in FASTER)),
    ),
)


def _trained(case: Case, topology: Topology) -> tuple[dict[Any, bytes], list[Any]]:
    built = stepped(case, topology)
    rates = [
        (group["max_lr"] * group["lr_mult"], group["wd_mult"], group["is_expert_parallel"])
        for inner in inner_optimizers(built.optimizer)
        for group in inner.param_groups
    ]
    here = held(built)
    bits = {name: array.tobytes() for name, array in here["params"].items()}
    for name, (_, _, arrays) in here["shards"].items():
        bits |= {(name, kind): array.tobytes() for kind, array in arrays.items()}
    return bits, rates


def _both(moe: bool, topology: Topology) -> tuple[Any, Any]:
    cases = (replace(case, moe=moe) for case in (BY_MEGATRON, BY_US))
    one, other = (_trained(case, topology) for case in cases)
    return one, other


@pytest.mark.parametrize(
    ("moe", "topology"),
    [
        (False, Topology(tp=2, dp=2, overlap=True)),
        (False, Topology(pp=2, dp=2)),  # layer 1, and so some groups, are on one stage only
        (True, Topology(dp=2, ep=2)),
    ],
    ids=["tp2-dp2", "pp2-dp2", "experts"],
)
def test_rates_and_decays_are_those_of_megatrons_groups(moe: bool, topology: Topology) -> None:
    case = replace(BY_US, moe=moe)
    if lacking := lacks(case, topology):
        pytest.skip(lacking)
    results = run(_both, topology.world_size, moe, topology)
    for (megatrons, _), (ours, _) in results:
        assert megatrons == ours
    all_rates = [sorted(rates) for _, (_, rates) in results]  # up to 0.14 ranks differ in order
    assert all(rates == all_rates[0] for rates in all_rates)  # the same groups on every rank
    assert {rate[:2] for rate in all_rates[0]} >= {(3 * case.lr, 0.5), (case.lr, 1.0)}


def test_a_pattern_that_matches_no_parameter_is_named_with_its_flag() -> None:
    (text,) = run(error_of_building, 1, BY_US, Topology(), {"wd_mults": (("nothing*", 0.5),)})
    assert "'nothing*' in wd_mults (--muon-wd-mult) matches no parameter of the model" in text


def _rates_of_adamw() -> tuple[float, float]:
    case = replace(BY_US, muon=(("lr_mults", (("embedding.*", 0.5),)),))
    (part,) = distributed_optimizers(start(case, Topology()).optimizer)
    groups = part.optimizer.param_groups
    by_rate = {group["max_lr"] * group["lr_mult"]: group["params"] for group in groups}
    return len(by_rate[0.5 * case.lr]), len(groups)


def test_a_matched_parameter_of_adamws_has_a_group_of_its_own() -> None:
    ((slow, groups),) = run(_rates_of_adamw, 1)
    assert slow == 1 or slow == 2  # word and position embeddings
    assert groups == 3
