"""What a step of real models costs: ``cd tests && python -m support.virtual_gpu.report
[WORD ...]``

For each model of ``plans.MODELS`` (with WORDs those whose names have one of them) the
Muon part of a step is recorded on the rank with most Newton-Schulz work: launches and
bytes over state of the second step; the first makes the fused kernels' tables, too.
With ``--deterministic`` as first word it is a step in torch's deterministic mode. The
vote and Megatron's own part of ``optimizer.step()`` are not in it (``megatron`` records
those).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

if __name__ == "__main__":  # as the tests' conftest does
    _tests = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_tests.parent), str(_tests), str(_tests / "python311")]
    import typing_override  # noqa: F401

from support.virtual_gpu.memory import Way, peak
from support.virtual_gpu.plans import MODELS, Model, plans_of
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.step import record_step

MIB = 1 << 20
TORCHS: Way = "host ahead, torch's memory"
HEAD = "| | launches | peak over state, busiest rank, MiB |\n|---|--:|--:|"


@dataclass(frozen=True, slots=True)
class ReportRow:
    """The busiest rank of a stage; dense weights and experts are stepped one after the
    other.
    """

    model: str
    matrices: int  # that the rank orthogonalizes
    recordings: tuple[Recording, ...]  # dense and experts'

    @property
    def launches(self) -> int:
        return sum(recording.launches for recording in self.recordings)

    def peak_bytes(self, way: Way = "wait") -> int:
        """As ``memory.peak`` has them if the allocator takes memory back in that
        way.
        """
        return max(peak(each.trace, way).over_state for each in self.recordings)


def row_of(model: Model, **settings: object) -> ReportRow:
    """The busiest rank of a model."""
    config, plans = plans_of(model, **settings)
    work = [
        sum(flops)
        for flops in zip(*(plan.ns_flops() for _, plan in plans), strict=True)
    ]
    rank = work.index(max(work))
    matrices = sum(len(plan.for_rank(rank).homes) for _, plan in plans)
    recordings = tuple(record_step(plan, rank, config, steps=2) for _, plan in plans)
    return ReportRow(model.name, matrices, recordings)


def main(words: Sequence[str]) -> None:
    settings: dict[str, object] = {}
    if words[:1] == ["--deterministic"]:
        torch.use_deterministic_algorithms(True)
        words, settings = words[1:], {"split_matrices": "off"}  # as a run has it there
    print(HEAD)
    for model in MODELS:
        if not words or any(word.lower() in model.name.lower() for word in words):
            row = row_of(model, **settings)
            mib = f"{row.peak_bytes() / MIB:,.0f}"
            print(f"| {model.name} | {row.launches:,} | {mib} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
