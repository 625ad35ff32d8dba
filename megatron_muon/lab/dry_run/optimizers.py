"""The DistributedOptimizers of a pipeline stage, with the exchange plans of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.pricing.work import WIDE, Optimizer, StateBytes, state_bytes
from megatron_muon.mcore.host.process_groups import local_experts
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.mcore.wiring.buffers.placement import (
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.grid import held_shards
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.plan import ExchangePlan, make_plans
from megatron_muon.rules.block_steps import block_plans
from megatron_muon.rules.int8_momentum import BLOCK
from megatron_muon.settings.rules import row_of

_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Planned:
    """A DistributedOptimizer of a stage."""

    plan: ExchangePlan  # of its Muon parameters
    experts: bool  # whether its parameters are those of experts
    buffers: list[Any]  # Megatron's grad buffers of it on this rank
    muon: set[Any]  # parameters in them that are Muon's
    block: ExchangePlan | None = None  # of its block steps, with ``full_period``


def planned_optimizers(
    run: Run, chunks: Sequence[Any], routes: Sequence[Route], device: Device
) -> list[Planned]:
    """The DistributedOptimizers of this rank's chunks, in the order of their steps."""
    parts = [(chunks, False)]
    if run.flags.overlap_param_gather_with_optimizer_step:
        # Megatron builds two optimizers then
        parts = [(chunks[:1], False), (chunks[1:], False)]
    parts.append((chunks, True))
    located = [
        (experts, *_located(routes, run.ranks.ep, part, experts=experts))
        for part, experts in parts
    ]
    located = [one for one in located if one[1]]  # that have buffers
    numerics = Numerics(run.config, device)
    every = [parameters for *_, parameters in located]
    grids = [
        world.grid(run.ranks, run.config.node_ranks, experts=experts)
        for experts, *_ in located
    ]
    plans = make_plans(every, grids, numerics)
    planned = [
        Planned(plan, experts, buffers, muon)
        for plan, (experts, buffers, muon, _) in zip(plans, located, strict=True)
    ]
    if run.config.full_period == 1:
        return planned
    blocks = block_plans(every, grids, numerics)
    return [
        replace(one, block=block) for one, block in zip(planned, blocks, strict=True)
    ]


def _located(
    routes: Sequence[Route], ep_size: int, chunks: Sequence[Any], *, experts: bool
) -> tuple[list[Any], set[Any], list[Parameter]]:
    """Buffers of a DistributedOptimizer, Muon's parameters in them, and the same on
    every EP rank.
    """
    kind = "expert_parallel_buffers" if experts else "buffers"
    buffers: list[Any] = []
    for chunk in chunks:
        buffers += getattr(chunk, kind)
    if not buffers:
        return [], set(), []
    here = muon_parameters(routes, buffers)
    ep_size = ep_size if experts else 1
    parameters = on_every_ep_rank(
        [p for _, p in here], ep_size, local_experts(chunks, ep_size)
    )
    return buffers, {param for param, _ in here}, parameters


def state_bytes_of(run: Run) -> StateBytes:
    """Bytes of an element's optimizer state."""
    # a script's arguments are changed to those of a machine without a GPU; the bytes
    # are kept beside them
    kept: StateBytes | None = getattr(run.flags, "state_bytes", None)
    held = state_bytes(run.flags) if kept is None else kept
    in_blocks = run.config.momentum_dtype == "int8"
    return held._replace(
        momentum=1 + _FP32 / BLOCK if in_blocks else held.momentum,
        of_rule=row_of(run.config.rule).moments,
    )


def optimizer_of(planned: Planned, held: StateBytes = WIDE) -> Optimizer:
    """An optimizer as the time model takes it."""
    parameters = 0
    gradients = 0
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
    grid = planned.plan.grid
    rest = [0] * planned.plan.size
    for buffer in planned.buffers:
        for param, (start, stop, bucket_id) in buffer.param_index_map.items():
            if param in planned.muon or start == stop:
                continue
            bucket = buffer.buckets[bucket_id]
            whole = Span(bucket.offset, bucket.offset + bucket.grad_data.numel())
            span = Span(start, stop)
            flat = Parameter("", (1, span.size), None, whole, span, 0, (), ())
            for ep_rank in range(grid.ep_size):  # each EP rank has experts of its own
                on_ep_rank = replace(flat, ep_rank=ep_rank)
                for rank, piece in held_shards(on_ep_rank, grid):
                    rest[rank] += piece.size
    return tuple(rest)
