"""Megatron's own schedules and groups decide lr and weight decay, each applied once.

A run under Megatron's OptimizerParamScheduler with decoupled rates and overrides of all
kinds equals, bit for bit, one whose groups are set by hand from the formulas below.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.installed import installed, lacks
from support.models.gpt import (
    Built,
    Case,
    Topology,
    build,
    held,
    on_ranks,
    start,
    stepped,
    write_grads,
)
from support.ranks import run
from support.runs.topologies import DP2_EP2, ONE, PP2_DP2, TP2_DP2, TP2_DP2_OVERLAP
from support.runs.whole import differences, whole

STEPS, WARMUP = 5, 2
LR, MIN_LR, EMBEDDING_LR, EMBEDDING_MIN_LR = 0.02, 0.002, 0.005, 0.001
FAST_LR, FAST_MIN_LR = 0.06, 0.01
START_WD, END_WD, FAST_START_WD, FAST_END_WD = 0.05, 0.2, 0.01, 0.4
FAST = "decoder.layers.1.mlp.linear_fc2.weight"
CASE = Case(steps=STEPS)
MOE = Case(steps=STEPS, moe=True)
FAST_EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"


def _optimizer(built: Built, fast: str) -> Any:
    """Decoupled rates for the embedding and output layer, and an override as muP's
    are.
    """
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    config = OptimizerConfig(
        optimizer="muon",
        lr=LR,
        min_lr=MIN_LR,
        decoupled_lr=EMBEDDING_LR,
        decoupled_min_lr=EMBEDDING_MIN_LR,
        weight_decay=START_WD,
        clip_grad=0.0,
        bf16=True,
        params_dtype=built.case.dtype,
        use_distributed_optimizer=True,
    )
    overrides = get_standard_config_overrides(config)
    chosen = {id(built.params[fast])} if fast in built.params else set()
    key = ParamKey(predicate=ParamPredicate(name="fast", fn=lambda p: id(p) in chosen))
    overrides[key] = {
        "max_lr": FAST_LR,
        "min_lr": FAST_MIN_LR,
        "start_wd": FAST_START_WD,
        "end_wd": FAST_END_WD,
    }
    with installed():
        return mcore_optimizer.get_megatron_optimizer(
            config, built.chunks, config_overrides=overrides
        )


def _scheduler(optimizer: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=MIN_LR,
        lr_warmup_steps=WARMUP,
        lr_decay_steps=STEPS + 2,
        lr_decay_style="linear",
        start_wd=START_WD,
        end_wd=END_WD,
        wd_incr_steps=STEPS + 2,
        wd_incr_style="linear",
    )


def _by_hand(built: Built, step: int, fast: str) -> None:
    """What each parameter's rate and decay are in step 0, 1, … of a linear schedule."""
    names = built.names
    for megatron in built.parts:
        groups = zip(
            megatron.model_float16_groups, megatron.optimizer.param_groups, strict=True
        )
        for params, group in groups:
            for param in params:  # all of a group agree
                name = names[id(param)]
                lr, min_lr, start_wd, end_wd = LR, MIN_LR, START_WD, END_WD
                if "embedding" in name or "output_layer" in name:
                    lr, min_lr = EMBEDDING_LR, EMBEDDING_MIN_LR
                if name == fast:
                    lr, min_lr, start_wd, end_wd = (
                        FAST_LR,
                        FAST_MIN_LR,
                        FAST_START_WD,
                        FAST_END_WD,
                    )
                decayed = (step - WARMUP) / (STEPS + 2 - WARMUP)
                warm = lr * step / WARMUP
                group["lr"] = (
                    warm if step <= WARMUP else min_lr + (1 - decayed) * (lr - min_lr)
                )
                wd = start_wd + step / (STEPS + 2) * (end_wd - start_wd)
                group["weight_decay"] = wd if param.dim() > 1 else 0.0


def _train(
    case: Case, topology: Topology, fast: str, scheduled: bool
) -> dict[str, Any]:
    built = build(case, topology)
    built.optimizer = _optimizer(built, fast)
    scheduler = _scheduler(built.optimizer) if scheduled else None
    for step in range(STEPS):
        if not scheduled:
            _by_hand(built, step, fast)
        write_grads(built, step)
        ok, _, _ = built.optimizer.step()
        assert ok
        if scheduler is not None:
            scheduler.step(increment=1)
    return held(built)


@pytest.mark.parametrize(
    "case, topology, fast", [(CASE, TP2_DP2, FAST), (MOE, DP2_EP2, FAST_EXPERT)]
)
def test_schedules_and_overrides_are_applied_once(
    case: Case, topology: Topology, fast: str
) -> None:
    by_megatron = whole(on_ranks(_train, case, topology, fast, True))
    by_hand = whole(on_ranks(_train, case, topology, fast, False))
    assert differences(by_megatron, by_hand) == []
    without_override = whole(on_ranks(_train, case, topology, "nothing", True))
    assert {d.split()[1] for d in differences(by_megatron, without_override)} == {fast}


FASTER = ("*.linear_fc2.*", "decoder.layers.1.*", "embedding.*")
# In turn: by Megatron's own means, and by the plugin's settings.
BY_MEGATRON = Case(faster=FASTER)
BY_US = replace(BY_MEGATRON, faster=()).with_muon(
    lr_mults=(("*", 7.0), ("*", 1.0), *((pattern, 3.0) for pattern in FASTER)),
    wd_mults=tuple((pattern, 0.5) for pattern in FASTER),
)


def _trained(case: Case, topology: Topology) -> tuple[dict[Any, bytes], list[Any]]:
    built = stepped(case, topology)
    rates = [
        (
            group["max_lr"] * group["lr_mult"],
            group["wd_mult"],
            group["is_expert_parallel"],
        )
        for group in built.param_groups
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
    "moe, topology",
    [
        (False, TP2_DP2_OVERLAP),
        # layer 1, and so some groups, are on one stage only
        (False, PP2_DP2),
        (True, DP2_EP2),
    ],
)
def test_rates_and_decays_are_those_of_megatrons_groups(
    moe: bool, topology: Topology
) -> None:
    case = replace(BY_US, moe=moe)
    if lacking := lacks(case, topology):
        pytest.skip(lacking)
    results = run(_both, topology.world_size, moe, topology)
    for (megatrons, _), (ours, _) in results:
        assert megatrons == ours
    # up to 0.14 ranks differ in order
    all_rates = [sorted(rates) for _, (_, rates) in results]
    # the same groups on every rank
    assert all(rates == all_rates[0] for rates in all_rates)
    assert {rate[:2] for rate in all_rates[0]} >= {(3 * case.lr, 0.5), (case.lr, 1.0)}


def _rates_of_adamw() -> tuple[float, float]:
    case = Case().with_muon(lr_mults=(("embedding.*", 0.5),))
    (part,) = start(case, ONE).parts
    groups = part.optimizer.param_groups
    by_rate = {group["max_lr"] * group["lr_mult"]: group["params"] for group in groups}
    return len(by_rate[0.5 * case.lr]), len(groups)


def test_a_matched_parameter_of_adamws_has_a_group_of_its_own() -> None:
    ((slow, groups),) = run(_rates_of_adamw, 1)
    assert slow == 1 or slow == 2  # word and position embeddings
    assert groups == 3
