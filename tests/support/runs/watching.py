"""Cases that log, and what they log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from support.models.gpt import on_ranks, start, train
from support.runs.cases import Case, Topology
from support.runs.whole import Whole, whole

Rows = dict[str, dict[str, float]]  # numbers of a step by row and name


def watched(case: Case, interval: int = 1) -> Case:
    """The case with a logging step every ``interval`` steps."""
    return case.with_muon(log_interval=interval)


def by_row(numbers: Mapping[str, float]) -> Rows:
    """A step's numbers, ``muon_NUMBER/ROW``, by row."""
    rows: Rows = defaultdict(dict)
    for tag, value in numbers.items():
        name, _, row = tag.removeprefix("muon_").partition("/")
        rows[row][name] = value
    return dict(rows)


def having(rows: Rows, name: str) -> Rows:
    """The rows that have a number: ``momentum_norm`` those of Muon's matrices,
    ``gradient_rms`` AdamW's, ``output_rms`` layers, ``max_logit`` attentions.
    """
    return {row: numbers for row, numbers in rows.items() if name in numbers}


def logged(case: Case, topology: Topology) -> tuple[Whole, list[Rows]]:
    """What a run that logs each step holds at its end, and the numbers of its steps,
    the same on all ranks.
    """
    ranks = on_ranks(train, watched(case), topology)
    numbers = ranks[0]["log"]["numbers"]
    assert all(rank["log"]["numbers"] == numbers for rank in ranks)
    return whole(ranks), [by_row(step) for step in numbers]


def promised(case: Case, topology: Topology) -> dict[str, float]:
    """Root mean squares of rows' updates, per unit of lr, if directions are
    orthogonal.
    """
    about: Any = on_ranks(_about, watched(case), topology)[0]
    return {
        row: said["promised_rms"]
        for row, said in about.items()
        if "promised_rms" in said
    }


def _about(case: Case, topology: Topology) -> Any:
    return start(case, topology).optimizer.watch._table.about
