"""What a rank's tables say it sends is what its peers' tables say they receive, element
by element.

The exchange of a whole stage is replayed over these tables with one number for each
element.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.table import RoundTable, round_tables
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import small_plan

T = TypeVar("T")


def _cut(flat: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    assert sum(sizes) == len(flat)
    parts, start = [], 0
    for size in sizes:
        parts.append(list(flat[start : start + size]))
        start += size
    return parts


def _messages(flat: list[T], counts: Sequence[tuple[int, int]]) -> dict[int, list[T]]:
    return dict(
        zip((r for r, _ in counts), _cut(flat, [n for _, n in counts]), strict=True)
    )


class _Rank:
    """One rank of a round; an element is known by its matrix and its place in the
    staging.
    """

    def __init__(self, plan: ExchangePlan, rank: int, table: RoundTable) -> None:
        self.rank, self.table = rank, table
        held = [s for s in plan.slices if s.rank == rank]
        place = {(s.parameter, s.elements.start): s for s in held}
        pieces = plan.for_rank(rank).shards
        self.runs = []
        for index, sizes in table.parameters:
            start = pieces[index].start
            for size in sizes:
                segment = place[index, start]
                assert segment.elements.size == size
                staged = range(segment.start, segment.start + size)
                self.runs.append([(segment.matrix, at) for at in staged])
                start += size
            assert start == pieces[index].stop
        moving = [self.runs[run] for run in table.outgoing]
        kept = len(table.kept_sizes)
        self.kept = moving[:kept]
        leaving = moving[kept:]
        parts: list[list[tuple[object, int]]] = [[] for _ in table.sent.sizes]
        for at, part in zip(table.sent.places, leaving, strict=True):
            parts[at] = [*part]
        flags = [at for at in range(len(parts)) if at not in table.sent.places]
        for before, at in pairwise([-1, *flags]):
            runs = at - before - 1
            assert runs <= table.sent.sizes[at] < runs + 8
            filled = table.sent.sizes[at] - runs
            parts[at] = [*[("flag", rank)] * runs, *[("filled", rank)] * filled]
        sent = [element for part in parts for element in part]
        assert [at for at, (name, _) in enumerate(sent) if name == "flag"] == [
            *table.sent.flags
        ]
        self.sent = _messages(sent, table.sent.counts)

    def staged(self, others: Sequence[_Rank]) -> list[tuple[int, int]]:
        received = [
            e for r, _ in self.table.received.counts for e in others[r].sent[self.rank]
        ]
        assert [n for _, n in self.table.received.counts] == [
            len(others[r].sent[self.rank]) for r, _ in self.table.received.counts
        ]
        flags = [at for at, (name, _) in enumerate(received) if name == "flag"]
        assert flags == [*self.table.received.flags]
        sources = [*self.kept, *_cut(received, self.table.received.sizes)]
        parts = [sources[at] for at in self.table.staged_from]
        assert [len(part) for part in parts] == [*self.table.staged_sizes]
        return [element for part in parts for element in part]


@pytest.mark.parametrize("limit", [1 << 30, 60_000, 1])
@pytest.mark.parametrize("tp, dp", [(1, 1), (2, 4), (3, 3)])
def test_every_element_gets_to_its_place_and_its_direction_back(
    tp: int, dp: int, limit: int
) -> None:
    plan = small_plan(MuonConfig(round_bytes=limit), tp, dp, hidden=48, ffn=96)
    tables = [
        round_tables(plan.for_rank(rank), plan.matrices) for rank in range(plan.size)
    ]
    homes = 0
    for number in range(len(plan.rounds)):
        ranks = [_Rank(plan, rank, table[number]) for rank, table in enumerate(tables)]
        staged = [rank.staged(ranks) for rank in ranks]
        for rank, elements in zip(ranks, staged, strict=True):
            table = rank.table
            wanted = [
                (i, at) for i in table.homes for at in range(plan.matrices[i].numel)
            ]
            assert elements == wanted
            starts = [(group.start, group.matrices[0]) for group in table.stacks]
            assert [elements[start] for start, _ in starts] == [
                (i, 0) for _, i in starts
            ]
            homes += len(table.homes)
        pairs = list(zip(ranks, staged, strict=True))
        sent = [_sent_back(rank.table, elements) for rank, elements in pairs]
        for rank, elements in pairs:
            _check_directions(rank, elements, sent)
    assert homes == len(plan.matrices)


def _sent_back(
    table: RoundTable, staged: list[tuple[int, int]]
) -> dict[int, list[tuple[int, int]]]:
    parts = _cut(staged, table.staged_sizes)
    flat = [element for at in table.scattered for element in parts[at]]
    return _messages(flat, table.results.counts)


def _check_directions(
    rank: _Rank,
    staged: list[tuple[int, int]],
    sent: Sequence[dict[int, list[tuple[int, int]]]],
) -> None:
    table = rank.table
    parts = _cut(staged, table.staged_sizes)
    kept = [parts[at] for at in table.kept_staged]
    received: list[Any] = []
    for r, _ in table.returned.counts:  # the next one starts at a multiple of 8
        received += [None] * (-len(received) % 8) + sent[r][rank.rank]
    sources = [*kept, *_cut(received, table.returned.sizes)]
    assert [sources[at] for at in table.result_of] == rank.runs
