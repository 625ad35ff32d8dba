"""--muon-full-period: between full steps each TP slice is a matrix of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_muon import MuonConfig
from support.checkpoints.resharding import resharded
from support.checkpoints.resuming import check as check_resumed
from support.expected.separate import trained_in_turns
from support.marks import in_each_format
from support.models import megatrons_muon
from support.models.gpt import (
    Case,
    Topology,
    error_of_building,
    held,
    muon_weights,
    on_ranks,
    start,
    take_steps,
    trained,
    truth,
    whole_weight,
)
from support.ranks import error_of, run
from support.runs.topologies import ONE, TP2, TP2_DP2, TP2_PP2
from support.runs.whole import differences, whole

# steps 0 and 3 are full
CASE = Case(gated=True).with_muon(full_period=3, block_lr_mult=0.5)
EXPERTS = replace(CASE, moe=True, steps=3)
SHARED = CASE.with_muon(split_matrices=2)
TP2_DP4 = Topology.of("tp2 dp4")


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
        (CASE, TP2_DP2),
        (CASE, TP2_DP4),
        (CASE, replace(TP2_DP2, overlap=True)),
        (CASE, TP2_PP2),
        (EXPERTS, replace(TP2_DP2, ep=2, sequence_parallel=True)),
        (SHARED, TP2_DP2),
    ],
)
def test_other_ranks_have_the_bits_of_two_tp_ranks(
    case: Case, topology: Topology
) -> None:
    alone = replace(TP2, sequence_parallel=case.moe)
    assert differences(trained(case, alone), trained(case, topology)) == []


def _sent(case: Case, topology: Topology) -> list[int]:
    variants = start(case, topology).part.muon.variants
    return [sum(muon.plan.sent_bytes()) for muon in variants]


def test_a_block_step_sends_nothing_over_tp_alone() -> None:
    (full, block), _ = on_ranks(_sent, CASE, TP2)
    assert full > 0 == block


@pytest.mark.parametrize("dirty", [False, True])
@in_each_format
def test_a_run_resumes_within_a_period(
    format: str, dirty: bool, tmp_path: Path
) -> None:
    check_resumed(replace(CASE, steps=4), TP2_DP2, format, tmp_path, dirty=dirty)


def test_other_ranks_go_on_within_a_period(tmp_path: Path) -> None:
    case = replace(CASE, steps=4)
    (_, one), (_, other) = resharded(case, TP2_DP2, case, TP2_PP2, tmp_path)
    assert differences(one, other) == []


def _after(steps: int, case: Case, topology: Topology) -> Any:
    """Start as if so many steps were taken, and take the case's."""
    built = start(case, topology)
    for group in built.param_groups:
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
    given = (before, TP2, False, tmp_path, "highest")
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
    (text,) = on_ranks(error_of_building, Case(), ONE, {"full_period": 2})
    assert "with TP 1 there are no slices" in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"block_lr_mult": 0.5},
            "of full_period (--muon-full-period), and there is none: give full_period",
        ),
        ({"full_period": 2, "log_interval": 1}, "not logged yet"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: Any, said: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        MuonConfig(**settings)
    assert said in str(caught.value)
