"""Turning a DistributedOptimizer that Megatron has just built around Adam into Muon's."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.load_check import models
from megatron_muon.mcore.routing.survey import survey
from megatron_muon.mcore.seams.rows import check_built, megatron_version
from megatron_muon.mcore.watching.watch import Watch
from megatron_muon.mcore.wiring import process_groups
from megatron_muon.mcore.wiring.buffers.bucket_groups import name_phases
from megatron_muon.mcore.wiring.buffers.bucket_layout import require_ordered
from megatron_muon.mcore.wiring.buffers.early_gathers import (
    early_gathers,
    gathers_one_by_one,
    wait_before_state_dicts,
)
from megatron_muon.mcore.wiring.buffers.early_setting import settled
from megatron_muon.mcore.wiring.buffers.placement import (
    Located,
    local_experts,
    muon_parameters,
    on_every_ep_rank,
)
from megatron_muon.mcore.wiring.buffers.shards import device_of, owned_shards
from megatron_muon.mcore.wiring.chained_optimizer import MuonChainedOptimizer
from megatron_muon.mcore.wiring.counted_once import count_once
from megatron_muon.mcore.wiring.distributed_optimizer import (
    MuonDistributedOptimizer,
    init_momentum,
    init_state_of,
    muon_over,
)
from megatron_muon.mcore.wiring.loss_scale import share_loss_scale
from megatron_muon.mcore.wiring.nonfinite import NonfiniteReport
from megatron_muon.mcore.wiring.process_groups import Stage
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    numerics_on,
    plan_device,
    said_of_products,
    try_products,
)
from megatron_muon.orthogonalize.newton_schulz import takes_batches
from megatron_muon.orthogonalize.numerics import Numerics, layout_free
from megatron_muon.planning import agreed
from megatron_muon.planning.describe import (
    active_line,
    connected_line,
    early_gathers_line,
    elementwise_line,
    late_gather_lines,
    newton_schulz_line,
    node_lines,
    not_shared_lines,
    start_line,
)
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.runtime.consensus import (
    PlanMismatchError,
    agree_everywhere,
    agree_on_grid,
    attempt,
    raise_together,
    together,
)
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.exchange.pieces import Exchange
from megatron_muon.runtime.fused import elementwise_on, said_of_elementwise, try_elementwise
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.runtime.patches import turn_into
from megatron_muon.runtime.tracing import phases
from megatron_muon.settings.config import MuonConfig
from megatron_muon.version import __version__

_has_said_active = False


def make_muons(
    optimizer: Any, model_chunks: Sequence[Any], config: MuonConfig, pg_collection: Any = None
) -> None:
    """Make Megatron's optimizer Muon's in place. Every rank of the world calls it.

    Args:
        optimizer: Megatron's ChainedOptimizer, just built: one DistributedOptimizer for dense
            weights (two with overlap_param_gather_with_optimizer_step) and one for experts, if
            any. A part in which nothing trains is a stub. Before core 0.14 a stage without experts
            has no part for them, though other stages do.
        model_chunks: this rank's model chunks.
        config: the settings.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        SeamError: an optimizer lacks an attribute that the plugin needs.
        PlanMismatchError: ranks disagree about the settings, or ranks of a stage about the plan.
        ValueError, NotImplementedError: a parameter cannot be routed, or a group is missing.
        RuntimeError: an installed kernel library does not work, or only another rank has an error.
    """
    parts = optimizer.chained_optimizers
    device = device_of(model_chunks)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    said = not_shared_lines(config, plan_device(device), is_deterministic=is_deterministic)
    config = layout_free(config, is_deterministic=is_deterministic)
    asked = config.early_param_gather
    numerics, late, description = together(
        lambda: _checked(parts, model_chunks, config, pg_collection), None, device
    )
    config = numerics.config
    for part in parts:
        part.muon = None
        turn_into(part, MuonDistributedOptimizer)
    agree_everywhere(description, device)
    instance = int(parts[0].distributed_optimizer_instance_id)
    stage = process_groups.stage_of(model_chunks, instance, pg_collection, device)
    muons = _made_together(parts, numerics, stage)
    said += late_gather_lines(late) if asked == "auto" else []
    once = stage.speaks and stage.pipeline_rank == 0
    lines = [*_active(), *(said if once else []), *survey(model_chunks, config, stage)]
    lines += count_once(parts, stage)
    turn_into(optimizer, MuonChainedOptimizer)
    name_phases(model_chunks)
    if config.early_param_gather != "off":
        wait_before_state_dicts(model_chunks)
    optimizer.voters = process_groups.voters(parts, stage)
    optimizer.decided_by_name = bool(config.muon_include or config.muon_exclude)
    lines += together(lambda: _completed(parts, muons, numerics, stage), None, device)
    lines += _connected(muons, stage)
    lines += _nodes(muons, config, stage)
    if muons:
        each = [muon for _, muon in muons]
        optimizer.nonfinite = NonfiniteReport(each, config, optimizer.voters, device)
    if config.log_interval is not None and muons:
        optimizer.watch = Watch(muons, model_chunks, config, stage, optimizer.voters)
    models.remember(model_chunks, config, stage)
    for line in lines:
        say(line)


def _active() -> list[str]:
    """The line that says the plugin is active: once in a process, on rank 0."""
    global _has_said_active
    if _has_said_active or dist.get_rank() != 0:
        return []
    _has_said_active = True
    return [active_line(__version__, megatron_version()[0])]


def _checked(
    parts: Sequence[Any], model_chunks: Sequence[Any], config: MuonConfig, pg_collection: Any
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
    lines = agreed.description([], numerics)
    if config.early_param_gather != "off":
        lines.append(f"gathers one by one: {gathers_one_by_one(device)}")
    return numerics, late, lines


def _completed(
    parts: Sequence[Any],
    muons: Sequence[tuple[Any, DistributedMuon]],
    numerics: Numerics,
    stage: Stage,
) -> list[str]:
    """Put each Muon inside its part; returns lines for this rank to print. No communication."""
    lines = []
    config, in_batches = numerics.config, takes_batches(stage.device)
    wanted = config.ns_iteration or numerics.iteration
    plain = wanted == "standard" and (config.ns_batch or 1) == 1
    if stage.speaks and not (plain and stage.device.type == "cpu"):
        products = said_of_products(numerics)
        lines.append(newton_schulz_line(numerics, products, in_batches=in_batches))
    if stage.speaks and stage.device.type != "cpu":
        lines.append(elementwise_line(said_of_elementwise(stage.device, numerics)))
    share_loss_scale(parts)
    for (_, before), (part, _) in itertools.pairwise(muons):
        before.start_next = partial(_start_muon, part)
    for at, (part, muon) in enumerate(muons):
        _put_inside(part, muon)
        part.stage_group = stage.group
        part.sizes = stage.sizes
        if process_groups.has_experts(part):
            part.ep_rank = stage.coordinates(part).ep_rank
        part.local_experts = local_experts(part.model_chunks, stage.sizes.ep)
        if stage.speaks:
            lines.append(
                start_line(
                    muon.plan,
                    stage=stage.pipeline_rank,
                    experts=process_groups.has_experts(part),
                    buckets=[len(buffer.buckets) for buffer in part.buffers],
                    earlier=[before.plan for _, before in muons[:at]],
                )
            )
            lines += _early(part, stage)
    return lines


def _early(part: Any, stage: Stage) -> list[str]:
    """The line that says after which rounds parameters are gathered."""
    if part.early_gathers is None:
        return []
    return [
        early_gathers_line(
            [(gather.after, gather.nbytes) for gather in part.early_gathers.gathers],
            len(part.muon.plan.rounds),
            stage=stage.pipeline_rank,
            experts=process_groups.has_experts(part),
            in_any_loop=part.early_gathers.is_on,
        )
    ]


def _nodes(
    muons: Sequence[tuple[Any, DistributedMuon]], config: MuonConfig, stage: Stage
) -> list[str]:
    """The warning where ranks that share a matrix may be of several nodes."""
    if not stage.speaks:
        return []
    here = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    ranks_here = int(here) if here.isdecimal() else config.node_ranks
    if ranks_here >= dist.get_world_size():  # there is one machine
        ranks_here = config.node_ranks
    return node_lines([muon.plan for _, muon in muons], config, ranks_here)


def _connected(muons: Sequence[tuple[Any, DistributedMuon]], stage: Stage) -> list[str]:
    """Make a GPU's connections to the plan's peers (gloo has its own); returns a line to print."""
    if stage.device.type == "cpu":
        return []
    start = time.perf_counter()
    peers = sum(muon.connect() for _, muon in muons)
    torch.cuda.synchronize(stage.device)
    if not stage.speaks:
        return []
    seconds = time.perf_counter() - start
    return [connected_line(stage=stage.pipeline_rank, peers=peers, seconds=seconds)]


def _made_together(
    parts: Sequence[Any], numerics: Numerics, stage: Stage
) -> list[tuple[Any, DistributedMuon]]:
    """Each part that is no stub, with its Muon; an error of one rank stops the whole world."""
    muons: list[tuple[Any, DistributedMuon]] = []
    plans: list[ExchangePlan] = []
    error: BaseException | None = None
    parts = [part for part in parts if not part.is_stub_optimizer]
    for at, part in enumerate(parts):
        after = parts[at + 1 :]
        agreed_on, own = attempt(partial(_agreed_plan, part, numerics, stage, plans, after))
        error = error or own
        if agreed_on is None:
            continue
        plans.append(agreed_on.plan)
        muon, own = attempt(partial(_muon_of, part, agreed_on, numerics, stage))
        error = error or own
        if muon is not None:
            muons.append((part, muon))
    raise_together(error, None, stage.device)
    return muons


@dataclass(frozen=True, slots=True)
class _Agreed:
    """The plan of a DistributedOptimizer.

    Attributes:
        plan: see above.
        mine: this rank's Muon parameters by their place in it.
        is_followed: whether another optimizer's rounds follow.
    """

    plan: ExchangePlan
    mine: dict[int, Any]
    is_followed: bool


def _agreed_plan(
    dist_opt: Any,
    numerics: Numerics,
    stage: Stage,
    earlier: Sequence[ExchangePlan],
    after: Sequence[Any],
) -> _Agreed:
    """The plan of an optimizer, once all ranks of the stage agree on it.

    This rank raises an error of its own only after that agreement, so that no other rank waits.

    Args:
        dist_opt: Megatron's DistributedOptimizer.
        numerics: of the run.
        stage: the stage of this rank.
        earlier: plans of the optimizers before it, see ``make_plan``.
        after: the optimizers after it.
    """
    config = numerics.config
    node = dist.get_rank() // config.node_ranks
    coordinates = replace(stage.coordinates(dist_opt), node=node)
    mine: Located = []
    error: Exception | None = None
    try:
        try_products(stage.device, numerics)
        if config.align_shards:
            require_ordered(dist_opt.model_chunks)
        mine = _muon_parameters(dist_opt, config, stage)
        here = [parameter for _, parameter in mine]
        try_elementwise(stage.device, numerics, {width for p in here for width in p.widths})
        others = [_everywhere(other, config, stage) for other in after]
        later = sum(flops_of(parameters, numerics) for parameters in others)
        description = agreed.description(here, numerics, earlier, later)
    except Exception as routing_error:
        error = routing_error
        description = [*agreed.description([], numerics, earlier), f"error: {routing_error}"]
    try:
        grid = agree_on_grid(coordinates, description, stage.group, stage.device)
    except PlanMismatchError as mismatch:
        raise error or mismatch from None
    if error is not None:
        raise error
    plan = make_plan(_everywhere(dist_opt, config, stage), grid, numerics, earlier, later)
    first = coordinates.ep_rank * len(mine)  # index of this EP rank's first parameter
    return _Agreed(plan, {first + at: param for at, (param, _) in enumerate(mine)}, later > 0)


def _muon_parameters(dist_opt: Any, config: MuonConfig, stage: Stage) -> Located:
    chunks, sizes = dist_opt.model_chunks, stage.sizes
    return muon_parameters(chunks, dist_opt.buffers, sizes.tp, sizes.expert_tp, config)


def _everywhere(dist_opt: Any, config: MuonConfig, stage: Stage) -> list[Parameter]:
    """An optimizer's Muon parameters on all EP ranks."""
    here = [parameter for _, parameter in _muon_parameters(dist_opt, config, stage)]
    ep_size = stage.coordinates(dist_opt).ep_size
    return on_every_ep_rank(here, ep_size, local_experts(dist_opt.model_chunks, ep_size))


def _muon_of(
    dist_opt: Any, agreed_on: _Agreed, numerics: Numerics, stage: Stage
) -> DistributedMuon:
    """The Muon part of this rank."""
    plan, config, travels = agreed_on.plan, numerics.config, TORCH_DTYPE[numerics.travels]
    own, meter = plan.for_rank(dist.get_rank(stage.group)), Meter()
    shards = dict(owned_shards(dist_opt))
    main_params = {index: shards[agreed_on.mine[index]] for index in own.pieces}
    exchange = Exchange(own, plan.matrices, stage.group, travels, stage.device, meter)
    phase = phases(lambda: dist_opt.config.timers)
    elementwise = elementwise_on(stage.device, numerics)
    muon = DistributedMuon(numerics, plan, own, exchange, main_params, meter, phase, elementwise)
    if config.early_param_gather != "off":
        round_of = plan.round_of()
        rounds = {param: round_of[index] for index, param in agreed_on.mine.items()}
        dist_opt.early_gathers = early_gathers(
            dist_opt,
            rounds,
            last=len(plan.rounds) - 1,
            one_by_one=gathers_one_by_one(stage.device),
            is_followed=agreed_on.is_followed,
            is_on=config.early_param_gather == "on",
        )
        if dist_opt.early_gathers is not None:
            muon.applied = dist_opt.early_gathers.applied
    return muon


def _start_muon(dist_opt: Any) -> None:
    """Start an optimizer's step before the one before it waits for its last directions.

    The experts' first round is orthogonalized then, too. Another dense optimizer only starts:
    Megatron gathers the parameters of the one before it as soon as that has stepped.
    """
    if process_groups.has_experts(dist_opt):
        dist_opt.optimizer.begin_muon()
    else:
        dist_opt.optimizer.start_muon()


def _put_inside(dist_opt: Any, muon: DistributedMuon) -> None:
    dist_opt.muon = muon
    dist_opt.init_state_fn = init_state_of(dist_opt.init_state_fn, muon)
    dist_opt.optimizer.muon = muon
    adam: type[torch.optim.Optimizer] = type(dist_opt.optimizer)
    turn_into(dist_opt.optimizer, muon_over(adam))
    init_momentum(dist_opt.optimizer, muon)
