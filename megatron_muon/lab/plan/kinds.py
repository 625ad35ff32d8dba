"""The kinds of pipeline stage of a run, and their optimizers as the time model takes
them.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.dry_run.stages import (
    Planned,
    as_rank,
    built,
    planned_optimizers,
    sizes_of,
)
from megatron_muon.lab.pricing.work import WIDE, Optimizer, StateBytes, state_bytes
from megatron_muon.lab.progress import progress
from megatron_muon.mcore.routing.param_routing import weights, why_adamw
from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.routing.survey import (
    matched_patterns,
    require_matched,
    share_of,
)
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.planning.describe import Share, require_muons
from megatron_muon.planning.grid import held_shards, neighbours_of
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.rules.int8_momentum import BLOCK
from megatron_muon.settings.config import MuonConfig

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class PlannedKind:
    """Pipeline stages that are alike; the first of them stands for all."""

    stages: list[int]  # their numbers
    # world ranks of the first of them, in the first optimizer instance
    members: tuple[int, ...]
    share: Share  # elements of one such stage
    optimizers: list[list[Optimizer]]  # for each run, in the order of their steps


def makeup_of(
    flags: Namespace, config: MuonConfig, ranks: Ranks, chunks: Sequence[Any]
) -> tuple[object, ...]:
    """All that a rank's optimizer step of a stage follows from: equal ones have equal
    plans.
    """
    sizes = sizes_of(flags, ranks)
    neighbours = neighbours_of(
        [rank // config.node_ranks for rank in world.stage_ranks(ranks)]
    )
    return neighbours, *(
        (
            at,
            re.sub(r"\blayers\.\d+", "layers", weight.name),
            tuple(weight.param.shape),
            str(weight.param.dtype),
            why_adamw(weight, weight.tp_size(sizes), config),
            bool(getattr(weight.param, "shared_embedding", False)),
        )
        for at, chunk in enumerate(chunks)
        for weight in weights([chunk])
    )


def planned_kinds(
    runs: Sequence[tuple[Namespace, MuonConfig]],
    ranks: Ranks,
    device: Device,
    numbers: range,
) -> list[PlannedKind]:
    """Pipeline stages by kind, one of each planned.

    ``runs`` are flags and settings of runs of one model, such as with different
    layouts. The first one says which stages are alike; each is planned. ``numbers`` are
    the stages to look at.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses the flags, as in the run; or a stage has no parameters
            (ValueError).
    """
    alike: dict[tuple[object, ...], PlannedKind] = {}
    matched: set[str] = set()
    flags, config = runs[0]
    sizes = sizes_of(flags, ranks)
    every = sorted(range(ranks.pp), key=lambda number: number not in numbers)
    for number in progress(every, "pipeline stages"):
        if number not in numbers and matched.issuperset(config.patterns):
            break  # other stages are built for the patterns that match there
        with as_rank(world.first_ranks(ranks)[number], flags, ranks):
            chunks = built(flags, config, ranks)
            matched |= matched_patterns(chunks, sizes, config)
            makeup = makeup_of(flags, config, ranks, chunks)
            if number not in numbers:
                continue
            if makeup in alike:
                alike[makeup].stages.append(number)
                continue
            models = [chunks, *(built(*run, ranks) for run in runs[1:])]
            planned = [
                [
                    optimizer_of(one, state_bytes_of(*run))
                    for one in planned_optimizers(*run, ranks, each, device)
                ]
                for run, each in zip(runs, models, strict=True)
            ]
            if not planned[0]:
                raise ValueError(f"pipeline stage {number} has no parameters")
            share = share_of(routes_of(chunks, sizes, config), config)
            members = tuple(world.stage_ranks(ranks))
            alike[makeup] = PlannedKind([number], members, share, planned)
    require_matched(matched, config)
    if len(numbers) == ranks.pp:
        require_muons(sum((kind.share for kind in alike.values()), start=Share()))
    return list(alike.values())


def state_bytes_of(flags: Namespace, config: MuonConfig) -> StateBytes:
    """As they were given, where the flags are a script's, which knows no GPU."""
    given: StateBytes | None = getattr(flags, "state_bytes", None)
    held = state_bytes(flags) if given is None else given
    packed = {"bf16": 2, "int8": 1 + _FP32 / BLOCK}
    return held._replace(momentum=packed.get(config.momentum_dtype, held.momentum))


def optimizer_of(planned: Planned, held: StateBytes = WIDE) -> Optimizer:
    """An optimizer as the time model takes it."""
    parameters = gradients = 0
    has_main = False
    for buffer in planned.buffers:
        grads = [bucket.grad_data for bucket in buffer.buckets]
        itemsize = next(iter(buffer.param_index_map)).dtype.itemsize
        gradients += sum(grad.nbytes for grad in grads)
        parameters += sum(grad.numel() for grad in grads) * itemsize
        has_main = has_main or itemsize < _FP32
    rest = _rest_of(planned)
    return Optimizer(
        planned.plan, rest, parameters, gradients, has_main, held, planned.block
    )


def _rest_of(planned: Planned) -> tuple[int, ...]:
    """Number of elements that AdamW updates, by rank of the stage."""
    grid, rest = planned.plan.grid, [0] * planned.plan.size
    for buffer in planned.buffers:
        for param, (start, stop, bucket_id) in buffer.param_index_map.items():
            if param in planned.muon or start == stop:
                continue
            bucket = buffer.buckets[bucket_id]
            whole = Span(bucket.offset, bucket.offset + bucket.grad_data.numel())
            for ep_rank in range(grid.ep_size):  # each EP rank has experts of its own
                placed = Parameter(
                    "",
                    (1, stop - start),
                    None,
                    whole,
                    Span(start, stop),
                    0,
                    (),
                    (),
                    ep_rank,
                )
                for rank, piece in held_shards(placed, grid):
                    rest[rank] += piece.size
    return tuple(rest)
