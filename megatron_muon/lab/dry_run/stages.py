"""The optimizers of a pipeline stage with their exchange plans, by the code that the
run runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.chunks import build_chunks
from megatron_muon.lab.dry_run.model import Ranks, transformer_config
from megatron_muon.lab.dry_run.script import ScriptArguments
from megatron_muon.mcore.host.process_groups import Sizes, local_experts
from megatron_muon.mcore.routing.routes import Route, routes_of
from megatron_muon.mcore.wiring.buffers import bucket_layout
from megatron_muon.mcore.wiring.buffers.early_setting import settled
from megatron_muon.mcore.wiring.buffers.placement import (
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.mcore.wiring.validate import (
    REFUSED,
    raise_all,
    refuse_unsupported,
    unsliced,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.block_steps import block_numerics, block_plans
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class Planned:
    """A DistributedOptimizer of a stage."""

    plan: ExchangePlan  # of its Muon parameters
    experts: bool  # it has those of experts
    buffers: list[Any]  # Megatron's grad buffers of it on this rank
    muon: set[Any]  # parameters in them that are Muon's
    block: ExchangePlan | None = None  # of its block steps, with ``full_period``


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
            chunks = build_chunks(flags, transformer_config(flags, ranks))
    of_optimizer = OptimizerConfig(
        optimizer="adam",
        bf16=flags.bf16,
        fp16=flags.fp16,
        use_distributed_optimizer=True,
    )
    # given to the class, some of them would ask for a GPU
    for name in (*REFUSED, "overlap_param_gather_with_optimizer_step"):
        setattr(of_optimizer, name, getattr(flags, name, False))
    refuse_unsupported(of_optimizer, chunks)
    settled(config, of_optimizer, chunks)
    raise_all(unsliced(config, max(ranks.tp, ranks.expert_tp)))
    return chunks


def sizes_of(flags: Namespace, ranks: Ranks) -> Sizes:
    """The number of ranks that hold slices of a dense and of an expert's weight."""
    return (
        Sizes(ranks.tp, ranks.expert_tp, ranks.ep)
        if flags.num_experts
        else Sizes(ranks.tp)
    )


def planned_optimizers(
    flags: Namespace,
    config: MuonConfig,
    ranks: Ranks,
    chunks: Sequence[Any],
    device: Device = "cuda",
) -> list[Planned]:
    """The DistributedOptimizers of this rank's chunks, in the order of their steps."""
    # Megatron builds two optimizers then
    early = flags.overlap_param_gather_with_optimizer_step
    parts = [
        (part, False) for part in ((chunks[:1], chunks[1:]) if early else (chunks,))
    ]
    parts.append((chunks, True))
    routes = routes_of(chunks, Sizes(ranks.tp, ranks.expert_tp, ranks.ep), config)
    located = [
        _located(routes, ranks, part, experts=experts) for part, experts in parts
    ]
    numerics = Numerics(config, device)
    works = [flops_of(parameters, numerics) for _, _, parameters in located]
    planned: list[Planned] = []
    for at, (buffers, muon, parameters) in enumerate(located):
        if not buffers:
            continue
        experts = parts[at][1]
        grid = world.grid(ranks, config.node_ranks, experts=experts)
        earlier = [one.plan for one in planned]
        plan = make_plan(parameters, grid, numerics, earlier, sum(works[at + 1 :]))
        planned.append(Planned(plan, experts, buffers, muon))
    if config.full_period == 1:
        return planned
    every = [parameters for buffers, _, parameters in located if buffers]
    blocks = block_plans(
        every, [one.plan.grid for one in planned], block_numerics(numerics)
    )
    return [
        replace(one, block=block) for one, block in zip(planned, blocks, strict=True)
    ]


def _located(
    routes: Sequence[Route], ranks: Ranks, chunks: Sequence[Any], *, experts: bool
) -> tuple[list[Any], set[Any], list[Parameter]]:
    """Buffers of a DistributedOptimizer, Muon's parameters in them, and those on all EP
    ranks.
    """
    kind = "expert_parallel_buffers" if experts else "buffers"
    buffers = [buffer for chunk in chunks for buffer in getattr(chunk, kind)]
    if not buffers:
        return [], set(), []
    here = muon_parameters(routes, buffers)
    ep_size = ranks.ep if experts else 1
    parameters = on_every_ep_rank(
        [p for _, p in here], ep_size, local_experts(chunks, ep_size)
    )
    return buffers, {param for param, _ in here}, parameters
