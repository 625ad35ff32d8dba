"""Chosen ranks of a run take steps on the virtual GPU; what they do is checked, alone and together.

Each claim has faults, in words. A rank's messages are held against the plan of its whole stage, so
a message that fits no peer is found without the peer.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_muon.lab.routes.model_flags import Settled, megatron_is_quiet, said
from support.virtual_gpu.megatron import OptimizerSettings, RecordedTraining, record_training
from support.virtual_gpu.messages import Sizes, compare_with_plan, planned_messages
from support.virtual_gpu.races import collectives_and_clocks
from support.virtual_gpu.rank_report import RankReport, exchange_calls, report_of
from support.virtual_gpu.stage import check_calls
from support.virtual_gpu.stage_kinds import StageKind, stage_kinds

CLAIMS = (
    "every rank ends its steps",
    "one exchange plan in a stage",
    "no race",
    "no early free",
    "no unmatched send",
    "no rank out of order",
    "no rank waits for ever",
    "every message starts at 16 bytes",
)


@dataclass(slots=True)
class Verdict:
    """A run's."""

    kinds: list[StageKind]  # of its stages
    # of the ranks that ended their steps
    reports: dict[int, RankReport] = field(default_factory=dict)
    # by claim
    faults: dict[str, list[str]] = field(default_factory=lambda: {claim: [] for claim in CLAIMS})
    # ranks whose collectives were compared, and the size, of each process group
    compared: list[tuple[int, int]] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, list[str]]:
        """Claims that do not hold, with their faults."""
        return {claim: faults for claim, faults in self.faults.items() if faults}


def verdict_of(flags: Namespace, run: Settled) -> Verdict:
    """Have every chosen rank of every kind of stage take its steps."""
    training = OptimizerSettings()
    calls = {}
    with megatron_is_quiet():
        verdict = Verdict(stage_kinds(flags, run))
        for kind in verdict.kinds:
            planned = planned_messages(kind.plans, run.config)
            for rank in kind.chosen:
                try:
                    trained = record_training(flags, run.ranks, rank, run.config, training)
                except NotImplementedError:
                    raise  # the virtual GPU's own limits are no fault of the run
                except Exception as error:  # whatever it is, the rank does not end its steps
                    text = f"rank {rank}: {type(error).__name__}: {said(error)}"
                    verdict.faults[CLAIMS[0]].append(text)
                    continue
                calls[rank] = collectives_and_clocks(trained.recording.trace)
                _alone(verdict, kind, planned, rank, trained)
                gc.collect()  # Megatron's objects hold each other
    between = check_calls(calls)
    verdict.faults["no unmatched send"] += between.messages
    verdict.faults["no rank out of order"] += between.order
    if not between.order and not between.messages:  # else ranks wait where they do not fit
        verdict.faults["no rank waits for ever"] += between.stuck
    groups = {call.group.ranks for own in calls.values() for call, _ in own}
    verdict.compared = [(sum(rank in calls for rank in ranks), len(ranks)) for ranks in groups]
    return verdict


def _alone(
    verdict: Verdict, kind: StageKind, planned: Sizes, rank: int, trained: RecordedTraining
) -> None:
    """Faults of a rank by itself."""
    report = verdict.reports[rank] = report_of(trained.recording)
    faults = verdict.faults
    if trained.plans != kind.plans:
        text = f"rank {rank} makes another exchange plan than its stage"
        faults["one exchange plan in a stage"].append(text)
    faults["no race"] += [f"rank {rank}: {race}" for race in report.races]
    faults["no early free"] += [f"rank {rank}: {free}" for free in report.early_frees]
    faults[CLAIMS[-1]] += [f"rank {rank}: {message}" for message in report.unaligned]
    calls = exchange_calls(trained.recording)
    if calls:
        faults["no unmatched send"] += [
            f"world rank {rank}: {fault}"
            for fault in compare_with_plan(calls[0].rank, calls, planned)
        ]
    elif rank in _travelling(kind, planned):
        faults["no unmatched send"].append(f"rank {rank} exchanges nothing, by the plan it does")


def _travelling(kind: StageKind, planned: Sizes) -> Iterator[int]:
    """World ranks of the kind's first stage that the plan has messages for."""
    places = {place for pair in planned for place in pair}
    size = kind.plans[0].size if kind.plans else 0
    return (rank for at, rank in enumerate(kind.members) if at < size and at in places)
