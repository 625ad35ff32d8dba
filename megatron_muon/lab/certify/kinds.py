"""The distinct kinds of pipeline stage of a run, and the ranks of each that are looked at."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.stages import planned_stage
from megatron_muon.lab.plan.kinds import stage_makeup
from megatron_muon.lab.routes.model_flags import Settled
from megatron_muon.planning.plan import ExchangePlan

FEW = 8  # ranks of a stage that are all looked at where nothing is asked for
SAMPLE = 4


@dataclass(frozen=True, slots=True)
class Chosen:
    """A rank of the world, and the reason for looking at it."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The exchange plan of one of a stage's optimizers; ``experts``: it has those of experts."""

    experts: bool
    plan: ExchangePlan


@dataclass(frozen=True, slots=True)
class StageKind:
    """Pipeline stages that are alike; the first of them stands for all.

    Attributes:
        name: ``only``, ``first``, ``middle`` or ``last``, by the first of them.
        stages: their numbers.
        members: world ranks of the first of them, in all optimizer instances.
        chosen: those that are looked at.
        plans: of its optimizers, in the order in which they step.
    """

    name: str
    stages: tuple[int, ...]
    members: tuple[int, ...]
    chosen: tuple[Chosen, ...]
    plans: tuple[Plan, ...]

    @property
    def is_whole(self) -> bool:
        """Every rank of the stage is looked at."""
        return len(self.chosen) == len(self.members)


def stage_kinds(flags: Namespace, run: Settled, count: int | None) -> list[StageKind]:
    """Plan one stage of each kind, and choose its ranks.

    Args:
        flags: settled.
        run: as ``settled`` gives it.
        count: ranks of each kind; 0 for all; None: all where there are few, else a sample.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: see ``stages.routes``.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in range(run.ranks.pp):
        alike.setdefault(stage_makeup(flags, run.config, run.ranks, number), []).append(number)
    return [_kind(flags, run, tuple(numbers), count) for numbers in alike.values()]


def _kind(flags: Namespace, run: Settled, numbers: tuple[int, ...], count: int | None) -> StageKind:
    first = world.first_ranks(run.ranks)[numbers[0]]
    planned = planned_stage(flags, run.config, run.ranks, numbers[0])
    plans = tuple(Plan(one.experts, one.plan) for one in planned)
    with world.as_rank(first, run.ranks):
        members, of_instance = world.whole_stage(), world.stage_ranks(run.ranks)
    if count is None:
        count = 0 if len(members) <= FEW else SAMPLE
    if count == 0 or count >= len(members):
        chosen = [Chosen(rank, "all") for rank in members]
    else:
        chosen = _sample(members, of_instance, plans, count)
    name = _name(numbers[0], run.ranks.pp)
    return StageKind(name, numbers, tuple(members), tuple(chosen), plans)


def _name(number: int, stages: int) -> str:
    if stages == 1:
        return "only"
    return "first" if number == 0 else "last" if number == stages - 1 else "middle"


def _sample(
    members: list[int], of_instance: list[int], plans: tuple[Plan, ...], count: int
) -> list[Chosen]:
    """Ranks that differ most, in this order: then some at equal distances.

    The first one's last data-parallel peer is among them, so that two members of a group that
    reduces gradients are compared.
    """
    wanted: list[tuple[int, str]] = [(of_instance[0], "first")]
    for name, by_rank in (
        ("most Newton-Schulz", [sum(each) for each in zip(*_of(plans, "ns_flops"), strict=True)]),
        ("sends most", [sum(each) for each in zip(*_of(plans, "sent_bytes"), strict=True)]),
    ):
        if by_rank and max(by_rank):
            wanted.append((of_instance[by_rank.index(max(by_rank))], name))
    if plans:
        row = plans[0].plan.grid.of_ep(0)[0]
        wanted.insert(1, (of_instance[row[-1]], "last with the first one's shard of TP"))
    wanted.append((members[-1], "last"))
    spread = [(members[len(members) * at // count], "between") for at in range(count)]
    chosen: dict[int, str] = {}
    for rank, reason in (*wanted, *spread, *((rank, "between") for rank in members)):
        if rank in chosen:
            chosen[rank] += f", {reason}" if reason != "between" else ""
        elif len(chosen) < count:
            chosen[rank] = reason
    return [Chosen(rank, reason) for rank, reason in sorted(chosen.items())]


def _of(plans: tuple[Plan, ...], name: str) -> list[list[int]]:
    return [getattr(each.plan, name)() for each in plans]
