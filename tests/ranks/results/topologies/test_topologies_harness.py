"""What the comparisons of test_topologies* rest on: Megatron's own AdamW, and mistakes are seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.models.gpt import Case, Topology, check
from support.runs.whole import Piece, differences, whole

ADAM = Case(optimizer="adam", lr=1e-3, steps=3)
MOE = replace(ADAM, moe=True, gated=True)
CHUNKS = Topology(pp=2, dp=2, chunks=2, overlap=True, step_overlap=True)
PLAIN = {
    "chunks": (replace(ADAM, layers=4), CHUNKS),
    "instances": (ADAM, Topology(dp=4, instances=2)),
    "experts": (MOE, Topology(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, overlap=True)),
    "te-mla": (replace(MOE, grouped="te", mla="duplicated"), Topology(tp=2, dp=2, ep=2)),
    "mtp-tied": (replace(ADAM, mtp=True, tied=True), Topology(tp=2, pp=2)),
    "fp16": (replace(ADAM, bf16=False, fp16=True), Topology(2, 1, 2)),
}


@pytest.mark.parametrize(("case", "topology"), PLAIN.values(), ids=PLAIN.keys())
def test_plain_adam_passes_the_same_comparison(case: Case, topology: Topology) -> None:
    check(case, topology)


MAIN = torch.arange(4.0)
Results = list[dict[str, Any]]


def _result(owners: tuple[int, ...], start: int, end: int, **kinds: torch.Tensor) -> dict[str, Any]:
    """A rank that has all of the weight [0, 1, 2, 3] and owns elements of it."""
    return {
        "pieces": {"w": Piece((4,))},
        "params": {"w": torch.arange(4.0).numpy()},
        "owners": {"w": owners},
        "shards": {"w": (start, end, {k: v[start:end].numpy() for k, v in kinds.items()})},
    }


def _two_instances() -> Results:
    return [
        _result((r // 2 * 2, r // 2 * 2 + 1), r % 2 * 2, r % 2 * 2 + 2, main=MAIN) for r in range(4)
    ]


def _parameter(results: Results) -> None:
    results[2]["params"]["w"] = results[2]["params"]["w"] + 1


def _state(results: Results) -> None:
    results[3] = _result((2, 3), 2, 4, main=MAIN + 1)


def _hole(results: Results) -> None:
    results[1] = _result((0, 1), 3, 4, main=MAIN)


def _end(results: Results) -> None:
    results[1] = _result((0, 1), 2, 3, main=MAIN)


def _kinds(results: Results) -> None:
    for rank, start in ((2, 0), (3, 2)):
        results[rank] = _result((2, 3), start, start + 2, main=MAIN, exp_avg_sq=MAIN)


def _no_copy(results: Results) -> None:
    for rank in (2, 3):
        results[rank] |= {"owners": {}, "shards": {}}


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [
        (_parameter, "w differs on rank 2"),
        (_state, "main of w: replicas"),
        (_hole, "overlap or miss"),
        (_end, "end at 3"),
        (_kinds, "has the kinds"),
        (_no_copy, "has the kinds"),
    ],
)
def test_a_mistake_is_seen(mistake: Callable[[Results], None], seen: str) -> None:
    results = _two_instances()
    assert differences(whole(results), {"params": {"w": MAIN}, "main": {"w": MAIN}}) == []
    mistake(results)
    with pytest.raises(AssertionError, match=seen):
        whole(results)
