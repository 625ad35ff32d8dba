"""Turning a DistributedOptimizer that Megatron has just built around Adam into
Muon's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.host import process_groups
from megatron_muon.mcore.host.process_groups import Stage, local_experts
from megatron_muon.mcore.host.shards import device_of, owned_shards, states_of
from megatron_muon.mcore.host.states import init_state_of
from megatron_muon.mcore.load_check.models import remember
from megatron_muon.mcore.routing.routes import Route, routes_of
from megatron_muon.mcore.seams.rows import check_built
from megatron_muon.mcore.wiring.buffers.bucket_groups import name_phases
from megatron_muon.mcore.wiring.buffers.early_setting import gathers_one_by_one, settled
from megatron_muon.mcore.wiring.buffers.placement import (
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer
from megatron_muon.mcore.wiring.counted_once import count_once
from megatron_muon.mcore.wiring.distributed_optimizer import (
    MuonDistributedOptimizer,
    muon_over,
    start_of,
)
from megatron_muon.mcore.wiring.gradients import keep_biases_apart, share_loss_scale
from megatron_muon.mcore.wiring.nonfinite import NonfiniteReport
from megatron_muon.mcore.wiring.start import say_start
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    numerics_on,
    plan_device,
    try_products,
)
from megatron_muon.orthogonalize.numerics import Numerics, layout_free
from megatron_muon.planning import agreed, describe
from megatron_muon.planning.grid import neighbours_of
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.rules.fused import (
    elementwise_on,
    try_elementwise,
)
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import (
    agree_everywhere,
    agree_on_grid,
    attempt,
    raise_together,
    together,
)
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.patches import turn_into
from megatron_muon.runtime.tracing import phases
from megatron_muon.settings.config import MuonConfig


def make_muons(
    optimizer: Any,
    model_chunks: Sequence[Any],
    config: MuonConfig,
    pg_collection: Any = None,
) -> None:
    """Make Megatron's optimizer Muon's in place. Every rank of the world calls it.

    Args:
        optimizer: Megatron's ChainedOptimizer, just built: one DistributedOptimizer for
            dense weights (two with overlap_param_gather_with_optimizer_step) and one
            for experts, if any. A part in which nothing trains is a stub. Before core
            0.14 a stage without experts has no part for them, though other stages do.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        SeamError: an optimizer lacks an attribute that the plugin needs.
        PlanMismatchError: ranks disagree about the settings, or ranks of a stage about
            the plan.
        ValueError, NotImplementedError: a parameter cannot be routed, or a group is
            missing.
        RuntimeError: an installed kernel library does not work, or only another rank
            has an error.
    """
    parts = optimizer.chained_optimizers
    device = device_of(model_chunks)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    changes = describe.not_shared_lines(
        config, plan_device(device, config), is_deterministic=is_deterministic
    )
    config = layout_free(config, is_deterministic=is_deterministic)
    numerics, late, description = together(
        lambda: _checked(parts, model_chunks, config, pg_collection), None, device
    )
    config = numerics.config
    for part in parts:
        part.muon = None
        part.states = None if part.is_stub_optimizer else states_of(part)
        turn_into(part, MuonDistributedOptimizer)
    agree_everywhere(description, device)
    instance = int(parts[0].distributed_optimizer_instance_id)
    stage = process_groups.stage_of(model_chunks, instance, pg_collection, device)
    routes = together(lambda: _routed(model_chunks, numerics, stage), None, device)
    for part in parts:
        part.routes = routes
    muons = _made_together(parts, numerics, stage)
    if late is not None:
        changes.append(describe.late_gather_line(late))
    names = {
        describe.MISCOUNTED: count_once(parts, stage),
        describe.ADDED_UP: keep_biases_apart(routes, stage),
    }
    say_start(
        muons, model_chunks, routes, numerics, stage, changes=changes, names=names
    )
    turn_into(optimizer, MuonChainedOptimizer)
    name_phases(model_chunks)
    optimizer.voters = process_groups.voters(parts, stage)
    optimizer.decided_by_name = bool(config.muon_include or config.muon_exclude)
    together(lambda: _completed(parts, muons, stage), None, device)
    _connect(muons, stage)
    if muons:
        each = itertools.chain.from_iterable(muon.variants for _, muon in muons)
        optimizer.nonfinite = NonfiniteReport(
            list(each), config, optimizer.voters, device
        )
    if muons and config.log_interval is not None:
        from megatron_muon.mcore.watching.watch import Watch

        optimizer.watch = Watch(muons, model_chunks, config, stage, optimizer.voters)
    remember(model_chunks, config, stage)


def _checked(
    parts: Sequence[Any],
    model_chunks: Sequence[Any],
    config: MuonConfig,
    pg_collection: Any,
) -> tuple[Numerics, str | None, list[str]]:
    """Check this rank's optimizers and groups.

    Returns:
        The run's numerics, what ``settled`` says, and what all ranks must agree on.
    """
    for part in parts:
        check_built(part)
    process_groups.require_groups(model_chunks, pg_collection)
    config, late = settled(config, parts[0].config, model_chunks)
    device = device_of(model_chunks)
    numerics = numerics_on(device, config)
    try_products(device, numerics)
    if config.align_shards:
        from megatron_muon.mcore.wiring.buffers.bucket_layout import require_ordered

        require_ordered(model_chunks)
    lines = agreed.description([], numerics)
    if config.early_param_gather != "off":
        lines.append(f"gathers one by one: {gathers_one_by_one(device)}")
    return numerics, late, lines


def _routed(
    model_chunks: Sequence[Any], numerics: Numerics, stage: Stage
) -> list[Route]:
    """The routes of this rank's model, once the kernels for its matrices have been
    tried.
    """
    routes = routes_of(model_chunks, stage.sizes, numerics.config)
    muons = [route.muon for route in routes if route.muon is not None]
    widths: set[int] = set()
    for muon in muons:
        widths.update(muon.widths)
    try_elementwise(stage.device, numerics, widths)
    return routes


def _completed(
    parts: Sequence[Any], muons: Sequence[tuple[Any, DistributedMuon]], stage: Stage
) -> None:
    """Put each Muon inside its part. No communication."""
    share_loss_scale(parts)
    for (_, before), (part, _) in itertools.pairwise(muons):
        if getattr(part.config, "chunked_optimizer_state_offload", False):
            break  # its state is only on its way then
        before.start_next = start_of(
            part, orthogonalizes=process_groups.has_experts(part)
        )
    for part, muon in muons:
        _put_inside(part, muon)
        part.stage_group, experts = stage.group, process_groups.has_experts(part)
        if experts:
            part.ep_rank = stage.coordinates(part).ep_rank
        part.local_experts = local_experts(part.model_chunks, stage.sizes.ep)


def _connect(muons: Sequence[tuple[Any, DistributedMuon]], stage: Stage) -> None:
    """Make a GPU's connections to the plan's peers (gloo has its own); rank 0 prints a
    line.
    """
    if stage.device.type == "cpu":
        return
    begin = time.perf_counter()
    peers = 0
    for _, muon in muons:
        for each in muon.variants:
            peers += each.exchange.connect()
    torch.cuda.synchronize(stage.device)
    if dist.get_rank() == 0:
        say(
            f"{describe.PREFIX} connected to {peers} peer(s) of the exchange in "
            f"{time.perf_counter() - begin:.1f} s"
        )


def _made_together(
    parts: Sequence[Any], numerics: Numerics, stage: Stage
) -> list[tuple[Any, DistributedMuon]]:
    """Each part that is no stub, with its Muon; an error of one rank stops the whole
    world.
    """
    parts = [part for part in parts if not part.is_stub_optimizer]
    every = together(
        lambda: [_everywhere(part, stage) for part in parts], None, stage.device
    )
    plans, error = attempt(partial(_agreed_plans, parts, every, numerics, stage))
    raise_together(error, None, stage.device)  # all ranks of a stage have its errors
    assert plans is not None

    def made() -> list[tuple[Any, DistributedMuon]]:
        both = zip(parts, plans, strict=True)
        muons = [
            (part, _muon_of(part, agreed_on, numerics, stage))
            for part, agreed_on in both
        ]
        if numerics.config.full_period > 1:
            from megatron_muon.mcore.wiring.buffers.block_steps import add_block_steps

            add_block_steps(muons, every, stage)
        return muons

    return together(made, None, stage.device)


# The plan of a DistributedOptimizer, this rank's Muon parameters by their place in it,
# and whether another optimizer's rounds follow.
_Agreed = tuple[ExchangePlan, dict[int, Any], bool]


def _agreed_plans(
    parts: Sequence[Any],
    every: Sequence[list[Parameter]],
    numerics: Numerics,
    stage: Stage,
) -> list[_Agreed]:
    """The plans of all optimizers, the same in all instances; all ranks of the world
    call it.
    """
    nodes = [
        rank // numerics.config.node_ranks
        for rank in collectives.world_ranks(stage.group)
    ]
    found = collectives.all_gather_numbers(
        [stage.pipeline_rank, neighbours_of(nodes)], None, stage.device
    )
    near = min(count for at, count in found if at == stage.pipeline_rank)
    work = [flops_of(parameters, numerics) for parameters in every]
    plans: list[_Agreed] = []
    for at, part in enumerate(parts):
        coordinates = stage.coordinates(part)
        mine = muon_parameters(part.routes, part.buffers)
        earlier = [plan for plan, *_ in plans]
        later = sum(work[at + 1 :])
        here = [parameter for _, parameter in mine]
        description = agreed.description(here, numerics, earlier, later)
        grid = agree_on_grid(coordinates, description, stage.group, stage.device, near)
        plan = make_plan(every[at], grid, numerics, earlier, later)
        # index of this EP rank's first parameter
        first = coordinates.ep_rank * len(mine)
        params = {first + number: param for number, (param, _) in enumerate(mine)}
        plans.append((plan, params, later > 0))
    return plans


def _everywhere(dist_opt: Any, stage: Stage) -> list[Parameter]:
    """An optimizer's Muon parameters on all EP ranks."""
    here = [
        parameter for _, parameter in muon_parameters(dist_opt.routes, dist_opt.buffers)
    ]
    ep_size = stage.coordinates(dist_opt).ep_size
    return on_every_ep_rank(
        here, ep_size, local_experts(dist_opt.model_chunks, ep_size)
    )


def _muon_of(
    dist_opt: Any, agreed_on: _Agreed, numerics: Numerics, stage: Stage
) -> DistributedMuon:
    """The Muon part of this rank."""
    plan, mine, is_followed = agreed_on
    config, travels = numerics.config, TORCH_DTYPE[numerics.travels]
    own = plan.for_rank(dist.get_rank(stage.group))
    meter = Meter()
    shards = dict(owned_shards(dist_opt))
    main_params = {index: shards[mine[index]] for index in own.shards}
    exchange = Exchange(own, plan.matrices, stage.group, travels, stage.device, meter)
    phase = phases(dist_opt.config)
    elementwise = elementwise_on(stage.device, numerics)
    muon = DistributedMuon(
        numerics, plan, own, exchange, main_params, meter, phase, elementwise
    )
    if config.early_param_gather != "off":
        from megatron_muon.mcore.wiring.buffers.early_gathers import early_gathers

        round_of = plan.round_of()
        dist_opt.early_gathers = early_gathers(
            dist_opt,
            {param: round_of[index] for index, param in mine.items()},
            last=len(plan.rounds) - 1,
            one_by_one=gathers_one_by_one(stage.device),
            is_followed=is_followed,
            is_on=config.early_param_gather == "on",
        )
        if dist_opt.early_gathers is not None:
            muon.applied = dist_opt.early_gathers.applied
    return muon


def _put_inside(dist_opt: Any, muon: DistributedMuon) -> None:
    dist_opt.muon = muon
    if muon.config.momentum_dtype != "fp32":
        from megatron_muon.rules.bf16_momentum import packed  # for these dtypes only

        dist_opt.states = packed(dist_opt.optimizer, muon)
    dist_opt.init_state_fn = init_state_of(
        dist_opt.init_state_fn, dist_opt.states, muon
    )
    dist_opt.optimizer.muon, dist_opt.optimizer.states = muon, dist_opt.states
    adam: type[torch.optim.Optimizer] = type(dist_opt.optimizer)
    if dist_opt.config.optimizer_cpu_offload:
        # for it only
        from megatron_muon.mcore.host.offloaded_states import HybridOfAdamW

        turn_into(dist_opt.optimizer, muon_over(HybridOfAdamW))
        dist_opt.states.hold(muon, dist_opt.config)
        return
    turn_into(dist_opt.optimizer, muon_over(adam))
    # those of weights, which are loaded later, start at a step
    if not dist_opt.states.are_copies:
        for shard in muon.main_params.values():
            dist_opt.states.start_state(shard, muon.state_keys)
