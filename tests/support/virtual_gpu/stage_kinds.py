"""The distinct kinds of pipeline stage of a run, and the ranks of each that are looked at."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_muon.lab.routes.model_flags import Settled
from megatron_muon.planning.plan import ExchangePlan
from support.virtual_gpu.dry_run import planned_on, stage_makeup, world

FEW = 8  # ranks of a stage that are all looked at
SAMPLE = 4


@dataclass(frozen=True, slots=True)
class StageKind:
    """Pipeline stages that are alike; the first of them stands for all."""

    stages: tuple[int, ...]  # their numbers
    members: tuple[int, ...]  # world ranks of the first of them, in all optimizer instances
    chosen: tuple[int, ...]  # those that are looked at
    plans: tuple[ExchangePlan, ...]  # of its optimizers, in the order in which they step


def stage_kinds(flags: Namespace, run: Settled) -> list[StageKind]:
    """Plan one stage of each kind, and choose its ranks."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number in range(run.ranks.pp):
        alike.setdefault(stage_makeup(flags, run.config, run.ranks, number), []).append(number)
    return [_kind(flags, run, tuple(numbers)) for numbers in alike.values()]


def _kind(flags: Namespace, run: Settled, numbers: tuple[int, ...]) -> StageKind:
    first = world.first_ranks(run.ranks)[numbers[0]]
    (planned,) = planned_on(["cuda"], flags, run.config, run.ranks, numbers[0])
    plans = tuple(one.plan for one in planned)
    with world.as_rank(first, run.ranks):
        members, of_instance = world.whole_stage(), world.stage_ranks(run.ranks)
    chosen = members if len(members) <= FEW else _sample(members, of_instance, plans)
    return StageKind(numbers, tuple(members), tuple(chosen), plans)


def _sample(
    members: list[int], of_instance: list[int], plans: tuple[ExchangePlan, ...]
) -> list[int]:
    """The ranks that differ most, then the last ones.

    The first one's last data-parallel peer is among them, so that two members of a group that
    reduces gradients are compared.
    """
    wanted = [of_instance[0]]
    if plans:
        wanted.append(of_instance[plans[0].grid.of_ep(0)[0][-1]])
    for name in ("ns_flops", "sent_bytes"):
        by_rank = [sum(each) for each in zip(*_of(plans, name), strict=True)]
        if by_rank and max(by_rank):
            wanted.append(of_instance[by_rank.index(max(by_rank))])
    wanted += reversed(members)
    return sorted(list(dict.fromkeys(wanted))[:SAMPLE])


def _of(plans: tuple[ExchangePlan, ...], name: str) -> list[list[int]]:
    return [getattr(plan, name)() for plan in plans]
