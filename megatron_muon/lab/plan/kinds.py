"""The kinds of pipeline stage of a run, and their optimizers as the time model takes them."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.cpu.fused_adam import scratch_bytes
from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.chunks import optimizer_config
from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.dry_run.stages import (
    Planned,
    as_rank,
    built,
    planned_optimizers,
    sizes_of,
)
from megatron_muon.lab.pricing.memory import Buffers
from megatron_muon.lab.pricing.step import Optimizer
from megatron_muon.mcore.routing.param_routing import weights, why_adamw
from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.routing.survey import matched_patterns, require_matched, share_of
from megatron_muon.mcore.wiring.buffers.early_setting import settled
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.planning.describe import Share, require_muons
from megatron_muon.planning.grid import held_shards, neighbours_of
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.settings.config import MuonConfig

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class PlannedKind:
    """Pipeline stages that are alike; the first of them stands for all.

    Attributes:
        stages: their numbers.
        members: world ranks of the first of them; with several optimizer instances, those of the
            first one.
        share: elements of one such stage.
        gathers_early: whether gathers of parameters start within the step of the first run.
        late_with: what forbids that, if anything does.
        planned: for each run, the optimizers in the order of their steps.
    """

    stages: list[int]
    members: tuple[int, ...]
    share: Share
    gathers_early: bool
    late_with: str | None
    planned: list[list[Planned]]


def stage_makeup(
    flags: Namespace, config: MuonConfig, ranks: Ranks, number: int
) -> tuple[object, ...]:
    """Everything that a rank's optimizer step of a stage follows from, but for layers' numbers.

    Two stages with equal makeups have equal plans, but for names.

    Args:
        flags, config, ranks, number: see ``stages.planned_on``.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: see ``stages.routes``.
    """
    with as_rank(world.first_ranks(ranks)[number], flags, ranks):
        return _makeup(flags, config, ranks, built(flags, config, ranks))


def _makeup(
    flags: Namespace, config: MuonConfig, ranks: Ranks, chunks: Sequence[Any]
) -> tuple[object, ...]:
    sizes = sizes_of(flags, ranks)
    neighbours = neighbours_of([rank // config.node_ranks for rank in world.stage_ranks(ranks)])
    return neighbours, *(
        (
            at,
            re.sub(r"\blayers\.\d+", "layers", weight.name),
            tuple(weight.param.shape),
            str(weight.param.dtype),
            why_adamw(weight, sizes.tp_of(weight), config),
            bool(getattr(weight.param, "shared_embedding", False)),
        )
        for at, chunk in enumerate(chunks)
        for weight in weights([chunk])
    )


def planned_kinds(
    runs: Sequence[tuple[Namespace, MuonConfig]], ranks: Ranks, device: Device, numbers: range
) -> list[PlannedKind]:
    """Pipeline stages by kind, one of each planned.

    Args:
        runs: flags and settings of runs of one model, such as with different layouts. The first
            one says which stages are alike; each is planned.
        ranks: those of all ``flags``.
        device: kind of device of all ranks.
        numbers: the stages to look at.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: see ``stages.routes``.
    """
    alike: dict[tuple[object, ...], PlannedKind] = {}
    matched: set[str] = set()
    flags, config = runs[0]
    sizes = sizes_of(flags, ranks)
    for number in numbers:
        with as_rank(world.first_ranks(ranks)[number], flags, ranks):
            chunks = built(flags, config, ranks)
            matched |= matched_patterns(chunks, sizes, config)
            makeup = _makeup(flags, config, ranks, chunks)
            if makeup in alike:
                alike[makeup].stages.append(number)
                continue
            chosen, late_with = settled(config, optimizer_config(flags), chunks)
            every = [chunks, *(built(*run, ranks) for run in runs[1:])]
            alike[makeup] = PlannedKind(
                stages=[number],
                members=tuple(world.stage_ranks(ranks)),
                share=share_of(routes_of(chunks, sizes, config), config),
                gathers_early=chosen.early_param_gather != "off",
                late_with=late_with,
                planned=[
                    planned_optimizers(*run, ranks, here, device)
                    for run, here in zip(runs, every, strict=True)
                ],
            )
    for number in sorted(set(range(ranks.pp)) - set(numbers)):
        if matched.issuperset(config.patterns):
            break
        with as_rank(world.first_ranks(ranks)[number], flags, ranks):
            matched |= matched_patterns(built(flags, config, ranks), sizes, config)
    require_matched(matched, config)
    if len(numbers) == ranks.pp:
        require_muons(sum((kind.share for kind in alike.values()), start=Share()))
    return list(alike.values())


def optimizer_of(planned: Planned) -> Optimizer:
    """The plan of an optimizer's Muon parameters, and what is left to AdamW."""
    return Optimizer(planned.plan, tuple(rest_of(planned)))


def buffers_of(planned: Planned) -> Buffers:
    """Bytes of an optimizer's parameters and gradients on a rank."""
    parameters = gradients = 0
    has_main = False
    for buffer in planned.buffers:
        grads = [bucket.grad_data for bucket in buffer.buckets]
        itemsize = next(iter(buffer.param_index_map)).dtype.itemsize
        gradients += sum(grad.nbytes for grad in grads)
        parameters += sum(grad.numel() for grad in grads) * itemsize
        has_main = has_main or itemsize < _FP32
    return Buffers(parameters, gradients, has_main)


def rest_of(planned: Planned) -> list[int]:
    """Number of elements that AdamW updates, by rank of the stage."""
    rest = [0] * planned.plan.size
    for _, rank, elements in _held(planned, planned.muon):
        rest[rank] += elements
    return rest


def adamw_scratch(planned: Planned, *, everything: bool = False) -> list[int]:
    """Bytes of temporaries in which the CPU's FusedAdam updates a parameter, by rank of the stage.

    Biases and other parameters of one dim have no weight decay, as by Megatron's rule.

    Args:
        planned: the optimizer.
        everything: Muon's parameters are AdamW's, too.
    """
    most = [0] * planned.plan.size
    for param, rank, elements in _held(planned, set() if everything else planned.muon):
        most[rank] = max(most[rank], scratch_bytes(elements, decays=param.dim() > 1))
    return most


def _held(planned: Planned, without: Container[Any]) -> Iterator[tuple[Any, int, int]]:
    """Pieces of parameters: the parameter, the rank of the stage, and elements on it."""
    grid = planned.plan.grid
    for buffer in planned.buffers:
        for param, (start, stop, bucket_id) in buffer.param_index_map.items():
            if param in without or start == stop:
                continue
            bucket = buffer.buckets[bucket_id]
            whole = Span(bucket.offset, bucket.offset + bucket.grad_data.numel())
            for ep_rank in range(grid.ep_size):  # each EP rank has experts of its own
                placed = Parameter(
                    "", (1, stop - start), None, whole, Span(start, stop), 0, (), (), ep_rank
                )
                for rank, piece in held_shards(placed, grid):
                    yield param, rank, piece.size
