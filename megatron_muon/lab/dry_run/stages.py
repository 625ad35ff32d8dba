"""The optimizers of a pipeline stage with their exchange plans, by the code that the run runs."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.chunks import build_chunks, optimizer_config
from megatron_muon.lab.dry_run.model import Ranks, transformer_config
from megatron_muon.lab.dry_run.script import ScriptArguments
from megatron_muon.mcore.routing.routes import Route, routes_of
from megatron_muon.mcore.wiring.buffers import bucket_layout
from megatron_muon.mcore.wiring.buffers.early_setting import settled
from megatron_muon.mcore.wiring.buffers.placement import (
    local_experts,
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.mcore.wiring.process_groups import Sizes
from megatron_muon.mcore.wiring.validate import refuse_unsupported
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class Planned:
    """A DistributedOptimizer of a stage.

    Attributes:
        plan: the plan of its Muon parameters.
        experts: it has those of experts.
        buffers: Megatron's grad buffers of it on this rank.
        muon: parameters in them that are Muon's.
        seconds: processor time of making the plan.
    """

    plan: ExchangePlan
    experts: bool
    buffers: list[Any]
    muon: set[Any]
    seconds: float


def planned_stage(flags: Namespace, config: MuonConfig, ranks: Ranks, number: int) -> list[Planned]:
    """``planned_on`` a GPU without a library's symmetric products."""
    (planned,) = planned_on(["cuda"], flags, config, ranks, number)
    return planned


def planned_on(
    devices: Sequence[Device], flags: Namespace, config: MuonConfig, ranks: Ranks, number: int
) -> list[list[Planned]]:
    """The DistributedOptimizers of a pipeline stage, in the order that a run steps them in.

    Args:
        devices: kinds of device; for each the stage is planned once.
        flags: of ``flags``, or a script's arguments.
        config: the settings.
        ranks: those of ``flags``.
        number: the stage's.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses them, as in the run.
    """
    with as_rank(world.first_ranks(ranks)[number], flags, ranks):
        chunks = built(flags, config, ranks)
        return [planned_optimizers(flags, config, ranks, chunks, device) for device in devices]


def as_rank(rank: int, flags: Namespace, ranks: Ranks) -> AbstractContextManager[None]:
    """Within it this process is a rank of the run, see ``world.as_rank``."""
    options = flags.embeddings if isinstance(flags, ScriptArguments) else {}
    return world.as_rank(rank, ranks, **options)


def built(flags: Namespace, config: MuonConfig, ranks: Ranks) -> list[Any]:
    """This rank's model chunks in their DDP, without memory for parameters."""
    with world.without_memory(), bucket_layout.as_in_run(config):
        if isinstance(flags, ScriptArguments):
            chunks = flags.chunks()
        else:
            with world.without_inference_layers():
                chunks = build_chunks(flags, transformer_config(flags, ranks))
    refuse_unsupported(optimizer_config(flags), chunks)
    settled(config, optimizer_config(flags), chunks)
    return chunks


def sizes_of(flags: Namespace, ranks: Ranks) -> Sizes:
    """The number of ranks that hold slices of a dense and of an expert's weight."""
    return Sizes(ranks.tp, ranks.expert_tp, ranks.ep) if flags.num_experts else Sizes(ranks.tp)


def planned_optimizers(
    flags: Namespace,
    config: MuonConfig,
    ranks: Ranks,
    chunks: Sequence[Any],
    device: Device = "cuda",
) -> list[Planned]:
    """The DistributedOptimizers of this rank's chunks, in the order of their steps."""
    early = flags.overlap_param_gather_with_optimizer_step  # Megatron builds two optimizers then
    parts = (chunks[:1], chunks[1:]) if early else (chunks,)
    routes = routes_of(chunks, Sizes(ranks.tp, ranks.expert_tp, ranks.ep), config)
    located = [_located(routes, ranks, part, experts=False) for part in parts]
    located.append(_located(routes, ranks, chunks, experts=True))
    built = [one for one in located if one is not None]
    numerics = Numerics(config, device)
    works = [flops_of(one.parameters, numerics) for one in built]
    planned: list[Planned] = []
    for at, one in enumerate(built):
        plans = [other.plan for other in planned]
        planned.append(_planned(one, numerics, ranks, plans, sum(works[at + 1 :])))
    return planned


@dataclass(frozen=True, slots=True)
class _Located:
    """A DistributedOptimizer before it has a plan; ``parameters`` are on all EP ranks."""

    experts: bool
    buffers: list[Any]
    muon: set[Any]
    parameters: list[Parameter]


def _located(
    routes: Sequence[Route], ranks: Ranks, chunks: Sequence[Any], *, experts: bool
) -> _Located | None:
    kind = "expert_parallel_buffers" if experts else "buffers"
    buffers = [buffer for chunk in chunks for buffer in getattr(chunk, kind)]
    if not buffers:
        return None
    here = muon_parameters(routes, buffers)
    ep_size = ranks.ep if experts else 1
    parameters = on_every_ep_rank([p for _, p in here], ep_size, local_experts(chunks, ep_size))
    return _Located(experts, buffers, {param for param, _ in here}, parameters)


def _planned(
    one: _Located,
    numerics: Numerics,
    ranks: Ranks,
    earlier: Sequence[ExchangePlan],
    later: int,
) -> Planned:
    """One DistributedOptimizer with its exchange plan, as ``mcore.build`` makes it."""
    grid_of = world.expert_grid if one.experts else world.dense_grid
    grid = grid_of(ranks, numerics.config.node_ranks)
    start = time.process_time()
    plan = make_plan(one.parameters, grid, numerics, earlier, later)
    seconds = time.process_time() - start
    return Planned(plan, one.experts, one.buffers, one.muon, seconds)
