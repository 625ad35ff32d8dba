"""Makes the optimizer that Megatron has just built around Adam train with Muon."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.checkpoint.matrices import matrices_of_routes
from megatron_muon.mcore.host import process_groups
from megatron_muon.mcore.host.process_groups import Stage, local_experts
from megatron_muon.mcore.host.shards import device_of, owned_shards, states_of
from megatron_muon.mcore.host.states import init_state_of
from megatron_muon.mcore.routing.routes import Route, routes_of
from megatron_muon.mcore.wiring.buffers.bucket_groups import name_phases
from megatron_muon.mcore.wiring.buffers.placement import (
    Located,
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer
from megatron_muon.mcore.wiring.distributed_optimizer import (
    MuonDistributedOptimizer,
    muon_over,
)
from megatron_muon.mcore.wiring.gradients import (
    count_once,
    keep_biases_apart,
    share_loss_scale,
)
from megatron_muon.mcore.wiring.nonfinite import NonfiniteReport
from megatron_muon.mcore.wiring.start import start_lines, unusual
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    numerics_on,
    plan_device,
    try_products,
)
from megatron_muon.orthogonalize.numerics import Numerics, layout_free
from megatron_muon.planning import agreed
from megatron_muon.planning.describe import not_shared_lines
from megatron_muon.planning.grid import RankGrid, neighbours_of
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, make_plans
from megatron_muon.rules.block_steps import PeriodicMuon, block_numerics, block_plans
from megatron_muon.rules.fused import (
    elementwise_on,
    try_elementwise,
)
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import (
    Coordinates,
    agree,
    attempt,
    grid_of,
    raise_together,
    together,
)
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.patches import turn_into
from megatron_muon.runtime.tracing import phases
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import OWN, row_of


def make_muons(
    optimizer: Any,
    model_chunks: Sequence[Any],
    config: MuonConfig,
    pg_collection: Any = None,
) -> None:
    """Give Megatron's optimizer Muon, in place. Every rank of the world calls it.

    Args:
        optimizer: Megatron's ChainedOptimizer, just built: one DistributedOptimizer for
            dense weights (two with overlap_param_gather_with_optimizer_step) and one
            for experts, if any. A part in which nothing trains is a stub. Before core
            0.14 a stage without experts has no part for them, though other stages do.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        PlanMismatchError: ranks disagree about the settings, or ranks of a stage about
            the plan.
        ValueError, NotImplementedError: a parameter cannot be routed, or a group is
            missing.
        RuntimeError: an installed kernel library does not work, or only another rank
            has an error.
    """
    parts = optimizer.chained_optimizers
    device = device_of(model_chunks)
    numerics = together(
        lambda: _checked(model_chunks, config, pg_collection), None, device
    )
    config = numerics.config
    for part in parts:
        part.muon = None
        part.states = None if part.is_stub_optimizer else states_of(part)
        turn_into(part, MuonDistributedOptimizer)
    instance = int(parts[0].distributed_optimizer_instance_id)
    stage = process_groups.stage_of(model_chunks, instance, pg_collection, device)
    routes, compared = together(
        lambda: _routed(model_chunks, numerics, stage), None, device
    )
    agree(compared, None, device)
    mine = matrices_of_routes(routes, stage.sizes.ep) if stage.speaks else {}
    matrices: dict[str, Any] = {}
    for theirs in collectives.all_gather_json(mine, None):
        matrices |= theirs
    for part in parts:
        part.routes = routes
        part.matrices = matrices
    trained = _with_muons(parts, numerics, stage)
    lines = start_lines(trained, model_chunks, routes, numerics, stage)
    turn_into(optimizer, MuonChainedOptimizer)
    name_phases(model_chunks)
    optimizer.voters = process_groups.voters(parts, stage)
    optimizer.decided_by_name = bool(config.muon_include or config.muon_exclude)
    together(lambda: _completed(parts, trained, stage), None, device)
    _connect(trained, stage)
    if trained:
        muons = itertools.chain.from_iterable(part.muon.variants for part in trained)
        optimizer.nonfinite = NonfiniteReport(
            list(muons), numerics, optimizer.voters, device
        )
    if trained and config.log_interval is not None:
        from megatron_muon.mcore.watching.watch import Watch

        optimizer.watch = Watch(trained, model_chunks, config, stage, optimizer.voters)
    if "radii" in row_of(config.rule).settings:
        from megatron_muon.mcore.wiring.radii import RunRadii

        optimizer.radii = RunRadii(parts, config, optimizer.voters, device)
        for part in parts:
            part.radii = optimizer.radii
    for line in lines if dist.get_rank() == 0 else ():
        say(line)


def _checked(
    model_chunks: Sequence[Any], config: MuonConfig, pg_collection: Any
) -> Numerics:
    """The run's numerics, once this rank's groups and kernels have been checked."""
    process_groups.require_groups(model_chunks, pg_collection)
    device = device_of(model_chunks)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    kind = plan_device(device, config)
    unusual.extend(not_shared_lines(config, kind, is_deterministic=is_deterministic))
    config = layout_free(config, is_deterministic=is_deterministic)
    numerics = numerics_on(device, config)
    try_products(device, numerics)
    try_elementwise(device, numerics)
    return numerics


def _routed(
    model_chunks: Sequence[Any], numerics: Numerics, stage: Stage
) -> tuple[list[Route], list[str]]:
    """The routes of this rank's model, and the lines that all ranks must agree on. A
    function of one's own has been tried for its matrices.
    """
    routes = routes_of(model_chunks, stage.sizes, numerics.config)
    lines = agreed.device_lines(numerics)
    if row_of(numerics.config.rule) is OWN:
        from megatron_muon.rules.own import tried

        muons = [route.muon for route in routes if route.muon is not None]
        lines.append(tried(numerics, muons, stage.device))
    return routes, lines


def _completed(parts: Sequence[Any], trained: Sequence[Any], stage: Stage) -> None:
    """Put each Muon inside its part. No communication."""
    share_loss_scale(parts)
    count_once(parts, stage)
    keep_biases_apart(parts[0].routes, stage)
    for part in trained:
        part.stage_group = stage.group
        part.ep_rank = stage.coordinates(part).ep_rank
        part.local_experts = local_experts(part.model_chunks, stage.sizes.ep)
        _put_inside(part)
    for before, part in itertools.pairwise(trained):
        # The experts' optimizer also orthogonalizes its first round then. A second
        # dense one does not: Megatron gathers the first one's parameters as soon as it
        # has stepped.
        before.muon.start_next = partial(
            part.optimizer.start_muon, orthogonalizes=process_groups.has_experts(part)
        )


def _connect(trained: Sequence[Any], stage: Stage) -> None:
    """Connect a GPU to the plan's peers; gloo connects by itself."""
    if stage.device.type == "cpu":
        return
    for part in trained:
        for muon in part.muon.variants:
            muon.exchange.connect()
    torch.cuda.synchronize(stage.device)


def _with_muons(parts: Sequence[Any], numerics: Numerics, stage: Stage) -> list[Any]:
    """The parts that are no stubs, once each has its Muon; an error of one rank stops
    the whole world.
    """
    trained = [part for part in parts if not part.is_stub_optimizer]
    located = together(
        lambda: [muon_parameters(part.routes, part.buffers) for part in trained],
        None,
        stage.device,
    )
    # of each optimizer, on all EP ranks
    every: list[list[Parameter]] = []
    for part, mine in zip(trained, located, strict=True):
        ep_size = stage.coordinates(part).ep_size
        experts = local_experts(part.model_chunks, ep_size)
        here = [parameter for _, parameter in mine]
        every.append(on_every_ep_rank(here, ep_size, experts))
    node_ranks = numerics.config.node_ranks
    grids, error = attempt(partial(_agreed_grids, trained, located, stage, node_ranks))
    raise_together(error, None, stage.device)  # all ranks of a stage have its errors
    assert grids is not None

    def make() -> None:
        plans = make_plans(every, grids, numerics)
        for part, plan, mine in zip(trained, plans, located, strict=True):
            # number of this EP rank's first parameter
            first = stage.coordinates(part).ep_rank * len(mine)
            shards = dict(owned_shards(part))
            main_params = {
                index: shards[param]
                for index, (param, _) in enumerate(mine, first)
                if param in shards
            }
            part.muon = _muon_of(part, plan, numerics, main_params, Meter(), stage)
        if trained and numerics.config.full_period > 1:
            _add_block_steps(trained, every, stage)

    together(make, None, stage.device)
    return trained


def _agreed_grids(
    parts: Sequence[Any], located: Sequence[Located], stage: Stage, node_ranks: int
) -> list[RankGrid]:
    """The ranks of each optimizer, once those of a stage agree on its parameters; all
    ranks of the world call it.
    """
    nodes = [rank // node_ranks for rank in collectives.world_ranks(stage.group)]
    found = collectives.all_gather_numbers(
        [stage.pipeline_rank, neighbours_of(nodes)], None, stage.device
    )
    # the same in all instances
    near = min(count for at, count in found if at == stage.pipeline_rank)
    here = itertools.chain.from_iterable(located)
    lines = [agreed.parameter_line(parameter) for _, parameter in here]
    agree(lines, stage.group, stage.device)
    grids: list[RankGrid] = []
    for part in parts:
        coordinates = collectives.all_gather_numbers(
            astuple(stage.coordinates(part)), stage.group, stage.device
        )
        grids.append(grid_of([Coordinates(*one) for one in coordinates], near))
    return grids


def _muon_of(
    dist_opt: Any,
    plan: ExchangePlan,
    numerics: Numerics,
    main_params: Mapping[int, torch.Tensor],
    meter: Meter,
    stage: Stage,
) -> DistributedMuon:
    """This rank's Muon of an optimizer, by a plan."""
    own = plan.for_rank(dist.get_rank(stage.group))
    travels = TORCH_DTYPE[numerics.travels]
    exchange = Exchange(own, plan.matrices, stage.group, travels, stage.device, meter)
    phase = phases(dist_opt.config)
    elementwise = elementwise_on(stage.device, numerics)
    kind = PeriodicMuon if numerics.config.full_period > 1 else DistributedMuon
    return kind(numerics, plan, exchange, main_params, phase, elementwise)


def _add_block_steps(
    trained: Sequence[Any], every: Sequence[Sequence[Parameter]], stage: Stage
) -> None:
    """Give each Muon of a stage that of its block steps. No communication."""
    numerics = block_numerics(trained[0].muon.numerics)
    grids = [part.muon.plan.grid for part in trained]
    plans = block_plans(every, grids, numerics)
    for part, plan in zip(trained, plans, strict=True):
        full = part.muon
        shards = full.main_params
        full.block = _muon_of(part, plan, numerics, shards, full.meter, stage)


def _put_inside(dist_opt: Any) -> None:
    adam = dist_opt.optimizer
    muon = dist_opt.muon
    if muon.config.momentum_dtype == "int8":
        from megatron_muon.rules.int8_momentum import InBlocks  # for it only

        dist_opt.states = InBlocks.of(adam, muon)
    states = dist_opt.states
    dist_opt.init_state_fn = init_state_of(dist_opt.init_state_fn, states, muon)
    adam.muon = muon
    adam.states = states
    if dist_opt.config.optimizer_cpu_offload:
        # for it only
        from megatron_muon.mcore.host.offloaded_states import HybridOfAdamW

        turn_into(adam, muon_over(HybridOfAdamW))
        states.hold(muon, dist_opt.config)
        return
    turn_into(adam, muon_over(type(adam)))
    # those of weights, which are loaded later, start at a step
    if not states.are_copies:
        for shard in muon.main_params.values():
            states.start_state(shard, muon.rule.state_keys)
