"""--muon-full-period: between full steps each TP slice is a matrix of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_muon import MuonConfig
from support.checkpoints import resharding
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import RESHARDABLE, in_every_format
from support.expected.separate import trained_in_turns
from support.models import megatrons_muon
from support.models.gpt import (
    Case,
    Topology,
    error_of_building,
    held,
    inner_optimizers,
    muon_weights,
    start,
    take_steps,
    trained,
    truth,
    whole_weight,
)
from support.ranks import error_of, run, run_on
from support.runs.whole import differences, whole

CASE = Case(gated=True).with_muon(
    full_period=3, block_lr_mult=0.5
)  # steps 0 and 3 are full
EXPERTS = replace(CASE, moe=True, steps=3)
SHARED = CASE.with_muon(split_matrices=2)
TP2 = Topology(2)
DP2 = Topology(2, 1, 2)
DP4 = Topology(2, 1, 4)


def test_one_process_that_alternates_whole_and_block_steps_has_the_same_bits() -> None:
    result = trained(CASE, TP2)
    for name in muon_weights(CASE):
        apart = trained_in_turns(CASE, name, tuple(result["main"][name].shape))
        for kind, expected in apart.items():
            assert result[kind][name].equal(expected), f"{kind} {name}"


def test_the_first_step_is_full_and_the_second_is_not() -> None:
    for steps, equal in ((1, True), (2, False)):
        case = replace(CASE, steps=steps)
        unlike = differences(truth(replace(case, muon=())), trained(case, TP2))
        assert (unlike == []) is equal


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (CASE, DP2),
        (CASE, DP4),
        (CASE, replace(DP2, overlap=True)),
        (CASE, Topology(2, 2)),
        (EXPERTS, replace(DP2, ep=2, sequence_parallel=True)),
        (SHARED, DP2),
    ],
    ids=["dp2", "dp4", "overlap", "pp2", "experts", "shared"],
)
def test_other_ranks_have_the_bits_of_two_tp_ranks(
    case: Case, topology: Topology
) -> None:
    alone = replace(TP2, sequence_parallel=case.moe)
    assert differences(trained(case, alone), trained(case, topology)) == []


def _sent() -> list[int]:
    built = start(CASE, TP2)
    (part,) = built.optimizer.chained_optimizers
    return [sum(muon.plan.sent_bytes()) for muon in part.muon.variants]


def test_a_block_step_sends_nothing_over_tp_alone() -> None:
    (full, block), _ = run(_sent, 2)
    assert full > 0 == block


@pytest.mark.parametrize("dirty", [False, True])
@in_every_format
def test_a_run_resumes_within_a_period(
    format: str, dirty: bool, tmp_path: Path
) -> None:
    check_resumed(replace(CASE, steps=4), DP2, format, tmp_path, dirty=dirty)


def test_other_ranks_go_on_within_a_period(tmp_path: Path) -> None:
    format = RESHARDABLE
    case = replace(CASE, steps=4)
    after = Topology(2, 2)
    one = run_on(resharding.saved, case, DP2, format, str(tmp_path))
    two = run(resharding.loaded, 4, case, after, format, str(tmp_path))
    assert (
        differences(*(whole([held for _, held in runs]) for runs in (one, two))) == []
    )


def _after(steps: int, case: Case, topology: Topology) -> Any:
    """Start as if so many steps were taken, and take the case's."""
    built = start(case, topology)
    for inner in inner_optimizers(built.optimizer):
        for group in inner.param_groups:
            group["step"] = steps
    take_steps(built, range(case.steps))
    return held(built)


@pytest.mark.skipif(
    megatrons_muon.lacking() is not None, reason=str(megatrons_muon.lacking())
)
def test_block_steps_are_megatrons_blockwise(tmp_path: Path) -> None:
    """In fp32 on both sides: sums in another order, amplified by at most 3.4445⁵ =
    485.
    """
    muon = {"momentum": megatrons_muon.MU, "nesterov": False, "matched_adamw_rms": 1.0}
    muon |= {"ns_coefficients": "quintic", "ns_dtype": "fp32", "full_period": 1 << 30}
    case = Case(bf16=False, steps=2).with_muon(**muon)
    before = replace(case, steps=1, muon=())
    given = (before, TP2, False, str(tmp_path), "highest")
    theirs = run(megatrons_muon.trained, 2, *given, timeout=240)
    blocks, full = (whole(run(_after, 2, steps, case, TP2))["main"] for steps in (1, 0))
    far, mains = 0.0, whole([each["after"] for each in theirs])["main"]
    for name in muon_weights(case):
        main = mains[name]
        moved = float((main - whole_weight(case, name, tuple(main.shape))).norm())
        assert float((blocks[name] - main).norm()) < 485 * 2.0**-24 * moved, name
        far = max(far, float((full[name] - main).norm()) / moved)
    assert far > 0.05  # a full first step is not blockwise


def _loaded_apart() -> str:
    return error_of(lambda: _after(5 + dist.get_rank(), replace(CASE, steps=1), TP2))


def test_ranks_that_have_loaded_different_steps_say_so() -> None:
    for text in run(_loaded_apart, 2):
        assert "the ranks of a pipeline stage have taken [5, 6] steps" in text


def test_without_slices_they_are_refused() -> None:
    (text,) = run_on(error_of_building, Case(), Topology(), {"full_period": 2})
    assert "with TP 1 there are no slices" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"block_lr_mult": 0.5},
            "full_period (--muon-full-period) is 1: give a period",
        ),
        ({"full_period": 2, "log_interval": 1}, "not logged yet"),
    ],
    ids=["rate", "log"],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: Any, said: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        MuonConfig(**settings)
    assert said in str(caught.value)
