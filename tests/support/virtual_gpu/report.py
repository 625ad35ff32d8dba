"""What a step of real models costs: ``cd tests && python -m support.virtual_gpu.report [WORD ...]``

For each model of ``plans.MODELS`` (with WORDs those whose names have one of them) the Muon part of
a step is recorded on rank 0 and on the rank with most Newton-Schulz work: launches, host
synchronisations and bytes over state, of the second step: the first makes the fused kernels'
tables, too. ``--set name=value`` changes a setting of ``MuonConfig``; with
``--set elementwise=foreach`` there are no fused kernels.
``--phases`` adds launches and peak by phase, and who holds the memory at the peak. The vote and
Megatron's own part of ``optimizer.step()`` are not in it (``megatron`` records those).
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as the tests' conftest does
    _tests = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_tests.parent), str(_tests), str(_tests / "python311")]
    import typing_override  # noqa: F401

from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import MODELS, Model, plans_of
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.step import record_step

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A rank of a stage; dense weights and experts are stepped one after the other.

    Attributes:
        model: its name.
        rank: of the stage.
        who: why this rank is shown.
        rounds: of each plan.
        matrices: that the rank orthogonalizes.
        recordings: dense and experts'.
    """

    model: str
    rank: int
    who: str
    rounds: tuple[int, ...]
    matrices: int
    recordings: tuple[Recording, ...]

    @property
    def launches(self) -> int:
        return sum(recording.launches for recording in self.recordings)

    @property
    def operations(self) -> int:
        return sum(recording.operations for recording in self.recordings)

    @property
    def collectives(self) -> int:
        return sum(len(recording.collectives) for recording in self.recordings)

    @property
    def host_syncs(self) -> int:
        return sum(len(recording.host_syncs) for recording in self.recordings)

    @property
    def peak_bytes(self) -> int:
        return max(recording.peak_bytes for recording in self.recordings)

    def line(self) -> str:
        rounds = "+".join(map(str, self.rounds))
        return (
            f"| {self.model} | {self.rank} ({self.who}) | {rounds} | {self.matrices} | "
            f"{self.operations:,} | {self.launches:,} | {self.collectives} | {self.host_syncs} | "
            f"{self.peak_bytes / MIB:,.0f} |"
        )


HEAD = (
    "| model | rank of the stage | rounds | matrices here | operations a step | launches | of them "
    "NCCL's | host syncs | peak over state, MiB |\n|---|---|---|--:|--:|--:|--:|--:|--:|"
)


def rows_of(model: Model, **settings: object) -> list[ReportRow]:
    """Rank 0 and the busiest rank of a model."""
    config, plans = plans_of(model, **settings)
    busiest = _busiest(plans)
    if busiest == 0:
        return [_row(model, config, plans, 0, "first and busiest")]
    return [
        _row(model, config, plans, 0, "first"),
        _row(model, config, plans, busiest, "busiest"),
    ]


def busiest_row(model: Model, **settings: object) -> ReportRow:
    """The busiest rank of a model; no other rank is recorded."""
    config, plans = plans_of(model, **settings)
    return _row(model, config, plans, _busiest(plans), "busiest")


def _busiest(plans: Sequence[tuple[str, ExchangePlan]]) -> int:
    work = [sum(flops) for flops in zip(*(plan.ns_flops() for _, plan in plans), strict=True)]
    return work.index(max(work))


def _row(
    model: Model,
    config: MuonConfig,
    plans: Sequence[tuple[str, ExchangePlan]],
    rank: int,
    who: str,
) -> ReportRow:
    return ReportRow(
        model.name,
        rank,
        who,
        tuple(len(plan.rounds) for _, plan in plans),
        sum(len(plan.for_rank(rank).homes) for _, plan in plans),
        tuple(record_step(plan, rank, config, steps=2) for _, plan in plans),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m support.virtual_gpu.report", description=__doc__
    )
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--phases", action="store_true")
    args = parser.parse_args(argv)
    settings = {}
    for text in args.set:
        name, _, value = text.partition("=")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    print(HEAD)
    for model in MODELS:
        if args.words and not any(word.lower() in model.name.lower() for word in args.words):
            continue
        start = time.process_time()
        for row in rows_of(model, **settings):
            print(row.line(), flush=True)
            if args.phases:
                _print_phases(row)
        print(f"{model.name}: {time.process_time() - start:.0f} s of CPU", file=sys.stderr)
    return 0


def _print_phases(row: ReportRow) -> None:
    for recording in row.recordings:
        for phase, count in recording.launches_by_phase.most_common():
            over = recording.peak.by_phase.get(phase, 0)
            print(f"    {phase or 'no phase'}: {count:,} launches, peak {over / MIB:,.0f} MiB")
        for place, nbytes in list(recording.peak.holders.items())[:6]:
            print(f"    at the peak {nbytes / MIB:,.0f} MiB: {place}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
