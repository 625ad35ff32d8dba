"""Every chosen rank steps on the virtual GPU; what it did is checked, alone and beside others."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_muon.lab.certify.kinds import Chosen, StageKind
from megatron_muon.lab.certify.messages import Sizes, compare_with_plan, planned_messages
from megatron_muon.lab.certify.ranks import RankReport, exchange_calls, report_of
from megatron_muon.lab.routes.model_flags import Settled, megatron_is_quiet, said
from megatron_muon.lab.virtual_gpu.megatron import (
    OptimizerSettings,
    RecordedTraining,
    record_training,
)
from megatron_muon.lab.virtual_gpu.races import MEMORY, collectives_and_clocks
from megatron_muon.lab.virtual_gpu.stage import Calls, check_calls, unrecorded

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """A verdict.

    Attributes:
        name: of the claim.
        looked_at: what it was held against, in words; empty: against nothing.
        faults: none where the claim holds.
        reason: why it was held against nothing.
    """

    name: str
    looked_at: str
    faults: tuple[str, ...]
    reason: str = ""

    @property
    def was_made(self) -> bool:
        """It was held against something, so it could have failed."""
        return bool(self.looked_at)

    @property
    def holds(self) -> bool:
        """A claim that was held against nothing does not."""
        return self.was_made and not self.faults


@dataclass(frozen=True, slots=True)
class Certificate:
    """A run's.

    Attributes:
        kinds: of its stages.
        reports: of the ranks of each kind; ranks that ended with an error are not among them.
        claims: the verdicts.
        compared: members of each process group whose collectives were compared, and its size.
    """

    kinds: tuple[StageKind, ...]
    reports: tuple[tuple[RankReport, ...], ...]
    claims: tuple[Claim, ...]
    compared: dict[str, tuple[int, int]]

    @property
    def holds(self) -> bool:
        """Every claim does."""
        return all(claim.holds for claim in self.claims)


@dataclass(slots=True)
class _Seen:
    """All that is kept of the ranks: figures, collectives, and faults by claim."""

    reports: list[RankReport] = field(default_factory=list)
    calls: dict[int, Sequence[object]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


def certify(
    flags: Namespace,
    run: Settled,
    kinds: Sequence[StageKind],
    training: OptimizerSettings,
    progress: Progress = lambda text: None,
) -> Certificate:
    """Have every chosen rank of every kind take its steps.

    Args:
        flags: settled.
        run: as ``settled`` gives it.
        kinds: of its stages.
        training: Megatron's settings.
        progress: is told about each rank.

    Raises:
        NotImplementedError: the virtual GPU lacks what a step calls.
    """
    calls: Calls = {}
    by_kind = []
    every = _Seen()
    for kind in kinds:
        seen = _Seen()
        with megatron_is_quiet():
            _look_at(kind, flags, run, training, seen, progress)
        by_kind.append(tuple(seen.reports))
        calls = {**calls, **seen.calls}  # type: ignore[dict-item]
        for name in ("errors", "plans", "messages"):
            getattr(every, name).extend(getattr(seen, name))
    claims = _claims(kinds, by_kind, every, calls)
    return Certificate(tuple(kinds), tuple(by_kind), tuple(claims), _compared(calls))


def _look_at(
    kind: StageKind,
    flags: Namespace,
    run: Settled,
    training: OptimizerSettings,
    seen: _Seen,
    progress: Progress,
) -> None:
    planned = planned_messages([each.plan for each in kind.plans], run.config)
    for at, chosen in enumerate(kind.chosen):
        progress(f"{kind.name} stage, rank {chosen.rank} ({at + 1} of {len(kind.chosen)})")
        trained = _trained(flags, run, chosen, training, seen)
        if trained is None:
            continue
        recording = trained.recording
        if trained.plans != tuple(each.plan for each in kind.plans):
            seen.plans.append(f"rank {chosen.rank} makes another exchange plan than its stage")
        calls = exchange_calls(recording)
        if calls:
            of_stage = calls[0].rank
            seen.messages += [
                f"world rank {chosen.rank}: {fault}"
                for fault in compare_with_plan(of_stage, calls, planned)
            ]
        elif any(recording.rank == rank for rank in _travelling(kind, planned)):
            seen.messages.append(f"rank {chosen.rank} exchanges nothing, by the plan it does")
        seen.reports.append(report_of(recording, chosen))
        seen.calls[chosen.rank] = collectives_and_clocks(recording.trace)
        gc.collect()  # Megatron's objects hold each other


def _travelling(kind: StageKind, planned: Sizes) -> Iterator[int]:
    """World ranks of the kind's first stage that the plan has messages for."""
    places = {place for pair in planned for place in pair}
    size = kind.plans[0].plan.size if kind.plans else 0
    for at, rank in enumerate(kind.members):
        if at < size and at in places:
            yield rank


def _trained(
    flags: Namespace, run: Settled, chosen: Chosen, training: OptimizerSettings, seen: _Seen
) -> RecordedTraining | None:
    try:
        return record_training(flags, run.ranks, chosen.rank, run.config, training)
    except NotImplementedError:
        raise  # the virtual GPU's own limits are no fault of the run
    except Exception as error:  # whatever it is, the rank does not end its steps
        seen.errors.append(f"rank {chosen.rank}: {type(error).__name__}: {said(error)}")
        return None


def _claims(
    kinds: Sequence[StageKind],
    by_kind: Sequence[Sequence[RankReport]],
    seen: _Seen,
    calls: Calls,
) -> Iterator[Claim]:
    reports = [report for of_kind in by_kind for report in of_kind]
    asked = sum(len(kind.chosen) for kind in kinds)
    ranks = f"{len(reports)} rank(s)" * bool(reports)
    yield Claim("every rank ends its steps", f"{asked} rank(s)", tuple(seen.errors))
    for claim in (
        Claim("one exchange plan in a stage", ranks, tuple(seen.plans)),
        *_alone(reports, ranks),
        *_together(kinds, seen, calls),
    ):
        yield claim if reports else replace(claim, looked_at="", reason="no rank ended its steps")


def _alone(reports: Sequence[RankReport], ranks: str) -> Iterator[Claim]:
    """Claims about each rank by itself."""
    handling = f"{ranks}, memory of collectives kept in each of the ways {', '.join(MEMORY)}"
    yield Claim("no race", handling, _faults(reports, "races"))
    yield Claim("no early free", handling, _faults(reports, "early_frees"))


def _together(kinds: Sequence[StageKind], seen: _Seen, calls: Calls) -> Iterator[Claim]:
    """Claims about ranks beside each other."""
    between = check_calls(calls)
    missing = unrecorded(calls)
    beside = "the plan's message to or from each peer, and the peers' own records"
    if not all(kind.is_whole for kind in kinds):
        beside += " where these are among the sample"
    yield Claim("no unmatched send", beside, (*seen.messages, *between.messages))
    among = "the ranks that were looked at" if missing else "every rank of every group"
    if not missing or any(members > 1 for members, _ in _compared(calls).values()):
        yield Claim("no rank out of order", f"collectives of {among}", tuple(between.order))
    else:
        alone = "no two members of a group were looked at"
        yield Claim("no rank out of order", "", tuple(between.order), alone)
    others = "; other ranks are taken to arrive" * bool(missing)
    if between.order or between.messages:
        yield Claim("no rank waits for ever", "", (), "collectives or messages do not fit")
    else:
        yield Claim("no rank waits for ever", among + others, tuple(between.stuck))


def _faults(reports: Sequence[RankReport], name: str) -> tuple[str, ...]:
    return tuple(
        f"rank {report.rank}: {fault}" for report in reports for fault in getattr(report, name)
    )


def _compared(calls: Calls) -> dict[str, tuple[int, int]]:
    """By group, the members whose collectives were compared, and all members."""
    groups = {call.group for own in calls.values() for call, _ in own if not call.point_to_point}
    return {
        group.name: (sum(rank in calls for rank in group.ranks), len(group.ranks))
        for group in sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))
    }
