"""A matrix whose direction is not finite stays where it was on every rank, and the run
says so.

Every other element of the model is that of a run without it.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_muon import MuonConfig
from megatron_muon.mcore.wiring import nonfinite
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer
from megatron_muon.orthogonalize import newton_schulz, strips
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import SLICE_OF
from megatron_muon.runtime.nonfinite import Skipped
from support.models import gpt
from support.models.gpt import (
    Case,
    Topology,
    on_ranks,
    start,
    take_step,
    trained,
    truth,
)
from support.ranks import error_of, run
from support.runs.topologies import (
    DP2,
    DP2_EP2,
    DP2_OVERLAP,
    DP3,
    DP4,
    DP4_INSTANCES2,
    ONE,
    TP2,
    TP2_DP2,
    TP2_DP2_EP2_ETP1,
    TP2_PP2,
)
from support.runs.whole import Whole

FC1 = "decoder.layers.1.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
BF16 = Case(steps=2)
FP32 = replace(BF16, bf16=False).with_muon(ns_dtype="fp32")
HEADS = BF16.with_muon(splits=(("*.linear_qkv.*", "heads"),))
MOE = replace(BF16, moe=True)
SHARED = replace(BF16, ffn=264).with_muon(split_matrices=4)
GRAM = SHARED.with_muon(ns_iteration="gram")


@contextmanager
def _changed(name: str, change: Callable[[Tensor, int], object]) -> Iterator[None]:
    """Change a whole gradient, and leave Megatron's norm out, which would raise before
    the step.

    On a GPU with Transformer Engine it does so in the next step only.
    """
    of_case = gpt.whole_grad

    def grad(case: Case, of: str, shape: tuple[int, ...], step: int) -> Tensor:
        made = of_case(case, of, shape, step)
        if of == name:
            change(made, step)
        return made

    with (
        mock.patch.object(gpt, "whole_grad", grad),
        mock.patch.object(MuonChainedOptimizer, "get_grad_norm", lambda self: 0.0),
    ):
        yield


def _plant(bad: float, place: tuple[int, int], grad: Tensor, step: int) -> None:
    if step:
        grad.view(-1, grad.size(-1))[place] = bad


def _planted(name: str, bad: float, place: tuple[int, int] = (3, 5)) -> Any:
    """One element of a gradient, from step 1 on: it is on one rank's shard."""
    return partial(_changed, name, partial(_plant, bad, place))


def _stays(after: Whole, case: Case, name: str, rows: slice = slice(None)) -> None:
    """Rows of a weight are those of the step before, all else is of a run without the
    fault.
    """
    before = truth(replace(case, steps=1))
    plain = truth(case)
    for kind in ("main", "params"):
        for other, value in after[kind].items():
            expected = plain[kind][other].clone()
            if other == name:
                assert not torch.equal(expected, before[kind][other])
                expected[rows] = before[kind][other][rows]
            assert torch.equal(value, expected), (kind, other)
    for other, value in after["exp_avg"].items():
        assert torch.equal(value, plain["exp_avg"][other]) == (other != name)


EXPERT = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
ROUTER = "decoder.layers.0.mlp.router.weight"


@pytest.mark.parametrize(
    "case, topology, name, bad",
    [
        (BF16, DP2, FC1, math.nan),
        (FP32, DP2_OVERLAP, FC2, -math.inf),
        (FP32, TP2_PP2, FC2, math.nan),  # columns of both TP ranks
        (BF16, DP4_INSTANCES2, FC1, math.inf),
        (MOE, TP2_DP2_EP2_ETP1, ROUTER, math.nan),  # TP ranks have replicas
        (MOE, TP2_DP2_EP2_ETP1, EXPERT, math.inf),
        (SHARED, DP4, FC1, math.nan),
        (SHARED, TP2_DP2, FC2, math.inf),  # as rows
        (GRAM, DP3, FC1, math.nan),  # two strips on one of three homes
    ],
)
def test_a_gradient_that_is_not_finite_does_not_change_its_matrix(
    case: Case, topology: Topology, name: str, bad: float
) -> None:
    _stays(trained(case, topology, _planted(name, bad)), case, name)


def test_one_head_stays_and_the_others_of_its_weight_move() -> None:
    """Rows of a group: its heads' Q, K, V, of 16 rows each."""
    after = trained(HEADS, TP2, _planted(QKV, math.nan, (16 * 5 + 20, 7)))
    _stays(after, HEADS, QKV, slice(16 * 6, 16 * 7))


def test_an_expert_of_a_batch_stays_and_the_others_move() -> None:
    case = replace(MOE, grouped="legacy")
    name = "decoder.layers.0.mlp.experts.weight2"
    after = trained(case, DP2_EP2, _planted(name, math.nan, (3, 5)))
    before = truth(replace(case, steps=1))["main"][name]
    plain = truth(case)["main"][name]
    stayed = (after["main"][name] == before).view(4, -1).all(dim=1)
    assert stayed.tolist() == [True, False, False, False]
    others = after["main"][name].view(4, -1)[1:]
    assert torch.equal(others, plain.view(4, -1)[1:])
    assert all(
        torch.equal(after["main"][k], v)
        for k, v in truth(case)["main"].items()
        if k != name
    )


# --- a finite matrix whose direction is not -------------------------------------------


@contextmanager
def _overflowing(
    name: str, *, is_so: bool, steps: Sequence[int] = range(8)
) -> Iterator[None]:
    """In some steps a gradient's entries are all alike, and the iteration of such a
    matrix overflows along one line; of a shared one only in the first strip.
    """

    def alike(grad: Tensor, step: int) -> None:
        if step in steps:
            grad.fill_(1e-3)

    of_whole, of_strips = newton_schulz.standard_iteration, strips._standard

    def whole(x: Tensor, *rest: Any) -> Tensor:
        overflows = is_so and x.amin() == x.amax()
        made = of_whole(x, *rest)
        if overflows:
            made[..., 1, :] = torch.inf
        return made

    def some(
        x: list[Tensor], steps: Any, products: Any, sharing: Any, **rest: Any
    ) -> None:
        overflows = is_so and x[0].amin() == x[0].amax() and 0 in sharing.numbers
        of_strips(x, steps, products, sharing, **rest)
        if overflows:
            x[0][1] = torch.inf

    with (
        _changed(name, alike),
        mock.patch.object(newton_schulz, "standard_iteration", whole),
        mock.patch.object(strips, "_standard", some),
    ):
        yield


@pytest.mark.parametrize(
    "case, topology, name",
    [
        (BF16, DP2, FC1),
        (FP32, TP2_DP2, FC2),
        (SHARED, DP4, FC1),
        (SHARED, TP2_DP2, FC2),  # as rows
    ],
)
def test_an_iteration_that_overflows_does_not_change_its_matrix(
    case: Case, topology: Topology, name: str
) -> None:
    case = replace(case, steps=1)
    plain, after = (
        trained(case, topology, partial(_overflowing, name, is_so=is_so))
        for is_so in (False, True)
    )
    for kind in ("main", "exp_avg"):
        for other, value in after[kind].items():
            same = torch.equal(value, plain[kind][other])
            assert same == (kind == "exp_avg" or other != name), (kind, other)
    assert torch.equal(after["main"][name], truth(replace(case, steps=0))["main"][name])


# --- what the run says ----------------------------------------------------------------


def _until_it_ends(
    case: Case, topology: Topology, fault: Callable[[], Any], every: int = 2
) -> dict[str, Any]:
    """Lines come every second step; at most eight steps."""
    said = io.StringIO()
    with (
        fault(),
        mock.patch.object(nonfinite, "_INTERVAL", every),
        contextlib.redirect_stdout(said),
    ):
        built = start(case, topology)
        said.truncate(0)
        for steps in range(1, 9):
            error = error_of(partial(take_step, built, steps - 1))
            if error != "no error":
                break
    muons = [part.muon for part in built.parts if part.muon]
    left = {
        k: v for muon in muons for k, v in muon.nonfinite.skipped(waits=True).items()
    }
    lines = [line.strip("\0") for line in said.getvalue().splitlines()]
    return {"steps": steps, "error": error, "lines": lines, "left": left}


def test_a_run_ends_on_every_rank_once_lines_in_a_row_name_a_matrix() -> None:
    """Planted from the second step on: lines of steps 2, 4 and 6 name it."""
    for limit, steps in ((3, 6), (1, 2)):
        case = BF16.with_muon(nonfinite_limit=limit)
        ranks = on_ranks(_until_it_ends, case, TP2_PP2, _planted(FC1, math.nan))
        for rank in ranks:
            assert rank["steps"] == steps
            assert rank["error"].startswith(
                f"FloatingPointError: {FC1}: the direction was not finite"
            )
            assert "resume from an earlier checkpoint" in rank["error"]
        last = [line for line in ranks[-1]["lines"] if "was not updated in" in line]
        assert last[0].startswith(
            f"[megatron_muon] step 2: {FC1} was not updated in at least 1 "
        )
        assert len(last) == limit and all("nor its momentum" in line for line in last)
        # its home says so at once, and once
        momenta = [
            line
            for rank in ranks
            for line in rank["lines"]
            if "the momentum of" in line
        ]
        assert len(momenta) == 1 and momenta[0].startswith("[megatron_muon] step 2: ")
        assert [FC1] == [name for rank in ranks for name in rank["left"]]


def test_full_and_block_steps_are_counted_as_one() -> None:
    case = BF16.with_muon(nonfinite_limit=3, full_period=2)
    for rank in on_ranks(_until_it_ends, case, TP2, _planted(FC1, math.nan), 1):
        assert rank["steps"] == 4
        assert rank["error"].startswith(f"FloatingPointError: {FC1}: the direction")
        assert len([line for line in rank["lines"] if "the momentum of" in line]) <= 1


def _of_slices() -> list[str]:
    counts = {f"w{SLICE_OF}{number}": Skipped(0, 0) for number in range(2)}
    muon: Any = SimpleNamespace(
        nonfinite=SimpleNamespace(skipped=lambda waits: dict(counts))
    )
    numerics = Numerics(MuonConfig(), "cpu")
    report = nonfinite.NonfiniteReport([muon], numerics, None, torch.device("cpu"))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for number, steps in ((0, 50), (1, 3)):
            counts[f"w{SLICE_OF}{number}"] = Skipped(steps, 0)
            report._log()
    return said.getvalue().splitlines()


def test_a_slice_that_is_left_after_another_one_is_named() -> None:
    (lines,) = run(_of_slices, 1)
    assert [line.split(" in at least ")[1].split()[0] for line in lines] == ["50", "3"]


def test_a_run_whose_iteration_overflows_ends_with_another_way_out() -> None:
    case = SHARED.with_muon(nonfinite_limit=2)
    fault = partial(_overflowing, FC1, is_so=True)
    for rank in on_ranks(_until_it_ends, case, DP2, fault):
        assert rank["steps"] == 4
        assert rank["error"].endswith(f"Newton-Schulz overflowed: {EXCLUDE}")
        assert rank["error"].startswith(f"FloatingPointError: {FC1}: ")
        assert not any("momentum" in line for line in rank["lines"])


EXCLUDE = "give the weight to AdamW by muon_exclude (--muon-exclude)"
GRAM_BY = "ns_iteration (--muon-ns-iteration) standard"
WAYS_OUT: dict[str, tuple[dict[str, Any], str]] = {
    "safe": ({}, ""),
    "fast": (
        {"preset": "fast"},
        f"set {GRAM_BY} and ns_dtype (--muon-ns-dtype) bf16, or ",
    ),
    "gram": ({"ns_iteration": "gram"}, f"set {GRAM_BY}, or "),
    "quintic": (
        {"ns_coefficients": "quintic", "ns_dtype": "fp32"},
        "set ns_coefficients (--muon-ns-coefficients) simple, or ",
    ),
}


@pytest.mark.parametrize("which", WAYS_OUT)
def test_the_way_out_of_an_overflow_names_what_is_not_in_force(which: str) -> None:
    settings, ways = WAYS_OUT[which]
    said = nonfinite._of_directions(Numerics(MuonConfig(**settings), "cuda"))
    assert said.endswith(f"so Newton-Schulz overflowed: {ways}{EXCLUDE}")


def test_a_line_without_the_matrix_begins_anew_and_a_skipped_step_does_not_count() -> (
    None
):
    """Lines of steps 2 and 6 name it, that of 4 does not; Megatron's loss scaler skips
    one step.
    """
    settings = (("nonfinite_limit", 2), ("momentum", 0.0))
    case = replace(BF16, bf16=False, fp16=True, overflow=((2, "*"),), muon=settings)
    fault = partial(_overflowing, FC1, is_so=True, steps=(0, 5))
    (rank,) = on_ranks(_until_it_ends, case, ONE, fault)
    assert (rank["steps"], rank["error"], rank["left"]) == (
        8,
        "no error",
        {FC1: (2, 0)},
    )
    assert [line[:22] for line in rank["lines"]] == [
        f"[megatron_muon] step {number}" for number in (2, 6)
    ]
