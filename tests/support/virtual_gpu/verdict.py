"""Chosen ranks of a run take steps on the virtual GPU; what they do is checked, alone
and together.

Each claim has faults, in words. A rank's messages are held against the plan of its
whole stage, so a message that fits no peer is found without the peer.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_muon.lab.routes.model_flags import megatron_is_quiet, said
from megatron_muon.planning.plan import ExchangePlan
from support.virtual_gpu.dry_run import Run, planned_on, stage_makeup, world
from support.virtual_gpu.megatron import (
    OptimizerSettings,
    RecordedTraining,
    record_training,
)
from support.virtual_gpu.messages import Sizes, compare_with_plan, planned_messages
from support.virtual_gpu.races import collectives_and_clocks
from support.virtual_gpu.rank_report import RankReport, exchange_calls, report_of
from support.virtual_gpu.stage import check_calls

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
    faults: dict[str, list[str]] = field(
        default_factory=lambda: {claim: [] for claim in CLAIMS}
    )
    # ranks whose collectives were compared, and the size, of each process group
    compared: list[tuple[int, int]] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, list[str]]:
        """Claims that do not hold, with their faults."""
        return {claim: faults for claim, faults in self.faults.items() if faults}


def verdict_of(run: Run) -> Verdict:
    """Have every chosen rank of every kind of stage take its steps."""
    training = OptimizerSettings()
    calls = {}
    with megatron_is_quiet():
        verdict = Verdict(stage_kinds(run))
        for kind in verdict.kinds:
            planned = planned_messages(kind.plans, run.config)
            for rank in kind.chosen:
                try:
                    trained = record_training(
                        run.flags,
                        run.ranks,
                        rank,
                        run.config,
                        training,
                        leaves_buckets=run.leaves_buckets,
                    )
                except NotImplementedError:
                    raise  # the virtual GPU's own limits are no fault of the run
                except (
                    Exception
                ) as error:  # whatever it is, the rank does not end its steps
                    text = f"rank {rank}: {type(error).__name__}: {said(error)}"
                    verdict.faults[CLAIMS[0]].append(text)
                    continue
                calls[rank] = collectives_and_clocks(trained.recording.trace)
                _alone(verdict, kind, planned, rank, trained)
                gc.collect()  # Megatron's objects hold each other
    between = check_calls(calls)
    verdict.faults["no unmatched send"] += between.messages
    verdict.faults["no rank out of order"] += between.order
    # else ranks wait where they do not fit
    if not between.order and not between.messages:
        verdict.faults["no rank waits for ever"] += between.stuck
    groups = {call.group.ranks for own in calls.values() for call, _ in own}
    verdict.compared = [
        (sum(rank in calls for rank in ranks), len(ranks)) for ranks in groups
    ]
    return verdict


def _alone(
    verdict: Verdict,
    kind: StageKind,
    planned: Sizes,
    rank: int,
    trained: RecordedTraining,
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
        faults["no unmatched send"].append(
            f"rank {rank} exchanges nothing, by the plan it does"
        )


def _travelling(kind: StageKind, planned: Sizes) -> Iterator[int]:
    """World ranks of the kind's first stage that the plan has messages for."""
    places = {place for pair in planned for place in pair}
    size = kind.plans[0].size if kind.plans else 0
    return (rank for at, rank in enumerate(kind.members) if at < size and at in places)


FEW = 8  # ranks of a stage that are all looked at
SAMPLE = 4


@dataclass(frozen=True, slots=True)
class StageKind:
    """Pipeline stages that are alike; the first of them stands for all."""

    stages: tuple[int, ...]  # their numbers
    # world ranks of the first of them, in all optimizer instances
    members: tuple[int, ...]
    chosen: tuple[int, ...]  # those that are looked at
    # of its optimizers, in the order in which they step
    plans: tuple[ExchangePlan, ...]


def stage_kinds(run: Run) -> list[StageKind]:
    """Plan one stage of each kind, and choose its ranks."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in range(run.ranks.pp):
        alike.setdefault(stage_makeup(run, number), []).append(number)
    return [_kind(run, tuple(numbers)) for numbers in alike.values()]


def _kind(run: Run, numbers: tuple[int, ...]) -> StageKind:
    first = world.first_ranks(run.ranks)[numbers[0]]
    (planned,) = planned_on(["cuda"], run, numbers[0])
    plans = tuple(one.plan for one in planned)
    with world.as_rank(first, run.ranks):
        members = world.whole_stage()
        of_instance = world.stage_ranks(run.ranks)
    chosen = members if len(members) <= FEW else _sample(members, of_instance, plans)
    return StageKind(numbers, tuple(members), tuple(chosen), plans)


def _sample(
    members: list[int], of_instance: list[int], plans: tuple[ExchangePlan, ...]
) -> list[int]:
    """The ranks that differ most, then the last ones.

    The first one's last data-parallel peer is among them, so that two members of a
    group that reduces gradients are compared.
    """
    wanted = [of_instance[0]]
    if plans:
        wanted.append(of_instance[plans[0].grid.ranks[0][0][-1]])
    for name in ("ns_flops", "sent_bytes"):
        by_rank = [sum(each) for each in zip(*_of(plans, name), strict=True)]
        if by_rank and max(by_rank):
            wanted.append(of_instance[by_rank.index(max(by_rank))])
    wanted += reversed(members)
    return sorted(list(dict.fromkeys(wanted))[:SAMPLE])


def _of(plans: tuple[ExchangePlan, ...], name: str) -> list[list[int]]:
    return [getattr(plan, name)() for plan in plans]
