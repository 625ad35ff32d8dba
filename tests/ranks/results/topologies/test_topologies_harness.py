"""What the comparisons of test_topologies* rest on: cutting, joining, and Megatron's own AdamW."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from support.models.gpt import Case, Topology, check
from support.runs.whole import Cut, Piece, cut, differences, join, whole

ADAM = Case(optimizer="adam", lr=1e-3, steps=3)
MOE = replace(ADAM, moe=True)
PLAIN = {
    "cp": (ADAM, Topology(tp=2, cp=2)),
    "chunks": (
        replace(ADAM, layers=4),
        Topology(pp=2, dp=2, chunks=2, overlap=True, step_overlap=True),
    ),
    "instances": (ADAM, Topology(dp=4, instances=2)),
    "experts": (MOE, Topology(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, overlap=True)),
    "legacy": (replace(MOE, grouped="legacy", gated=True), Topology(tp=2, dp=2, ep=2)),
    "te-mla": (
        replace(MOE, grouped="te", gated=True, mla="duplicated"),
        Topology(tp=2, dp=2, ep=2),
    ),
    "mla": (replace(ADAM, mla="column"), Topology(tp=2, dp=2)),
    "mtp-tied": (replace(ADAM, mtp=True, tied=True), Topology(tp=2, pp=2)),
    "fp16": (replace(ADAM, bf16=False, fp16=True), Topology(2, 1, 2)),
    "bf16-gradients": (replace(ADAM, fp32_grads=False), Topology(2, 1, 2)),
}


@pytest.mark.parametrize(("case", "topology"), PLAIN.values(), ids=PLAIN.keys())
def test_plain_adam_passes_the_same_comparison(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((3, 4), []),
        ((4, 3), [(0, 2, (1,))]),
        ((3, 4), [(1, 4, (1,))]),
        ((8, 3), [(0, 2, (1, 1))]),
        ((16, 3), [(0, 2, (4, 3, 1))]),
        ((4, 3, 8), [(0, 2, (1,)), (2, 2, (1, 1))]),
        ((4, 6, 5), [(0, 4, (1,)), (1, 3, (1,))]),
    ],
    ids=str,
)
def test_join_is_the_reverse_of_cut(
    shape: tuple[int, ...], cuts: list[tuple[int, int, tuple[int, ...]]]
) -> None:
    full = torch.randn(shape)
    every: list[tuple[Cut, ...]] = [()]
    for dim, count, sections in cuts:
        every = [(*c, Cut(dim, index, count, sections)) for c in every for index in range(count)]
    local = list(shape)
    for dim, count, _ in cuts:
        local[dim] //= count
    pieces = [Piece(tuple(local), each) for each in reversed(every)]
    assert all(piece.whole_shape == shape for piece in pieces)
    parts = {piece.cuts: cut(full, piece) for piece in pieces}
    assert torch.equal(join(parts), full)
    if cuts:
        parts.popitem()
        with pytest.raises(AssertionError, match="parts are missing"):
            join(parts)


def test_gated_rows_are_cut_in_both_halves() -> None:
    full = torch.arange(8.0).view(8, 1)
    part = cut(full, Piece((4, 1), (Cut(0, 1, 2, (1, 1)),)))
    assert part.flatten().tolist() == [2, 3, 6, 7]


# --- mistakes that ``whole`` must see --------------------------------------------------------


def _result(owners: tuple[int, ...], start: int, end: int, **kinds: torch.Tensor) -> dict[str, Any]:
    """A rank that has all of the weight [0, 1, 2, 3] and owns elements of it."""
    return {
        "pieces": {"w": Piece((4,))},
        "params": {"w": torch.arange(4.0).numpy()},
        "owners": {"w": owners},
        "shards": {"w": (start, end, {k: v[start:end].numpy() for k, v in kinds.items()})},
    }


MAIN = torch.arange(4.0)


def _two_instances() -> list[dict[str, Any]]:
    return [
        _result((r // 2 * 2, r // 2 * 2 + 1), r % 2 * 2, r % 2 * 2 + 2, main=MAIN) for r in range(4)
    ]


def test_replicas_with_owners_of_their_own_become_one() -> None:
    results = _two_instances()
    assert differences(whole(results), {"params": {"w": MAIN}, "main": {"w": MAIN}}) == []


def test_differing_parameters_are_seen() -> None:
    results = _two_instances()
    results[2]["params"]["w"] = results[2]["params"]["w"] + 1
    with pytest.raises(AssertionError, match="w differs on rank 2"):
        whole(results)


def test_differing_state_of_instances_is_seen() -> None:
    results = _two_instances()
    results[3] = _result((2, 3), 2, 4, main=MAIN + 1)
    with pytest.raises(AssertionError, match="main of w: replicas"):
        whole(results)


def test_hole_is_seen() -> None:
    results = _two_instances()
    results[1] = _result((0, 1), 3, 4, main=MAIN)
    with pytest.raises(AssertionError, match="overlap or miss"):
        whole(results)
    results[1] = _result((0, 1), 2, 3, main=MAIN)
    with pytest.raises(AssertionError, match="end at 3"):
        whole(results)


def test_copies_with_different_kinds_of_state_are_seen() -> None:
    results = _two_instances()
    for rank, start in ((2, 0), (3, 2)):
        results[rank] = _result((2, 3), start, start + 2, main=MAIN, exp_avg_sq=MAIN)
    with pytest.raises(AssertionError, match="has the kinds"):
        whole(results)


def test_state_that_only_one_of_several_copies_has_is_seen() -> None:
    results = _two_instances()
    for rank in (2, 3):
        results[rank]["owners"] = {}
        results[rank]["shards"] = {}
    with pytest.raises(AssertionError, match="has the kinds"):
        whole(results)
