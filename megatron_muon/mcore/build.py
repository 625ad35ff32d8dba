"""Turning a DistributedOptimizer that Megatron has just built around Adam into Muon's."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon import plan as plans
from megatron_muon.agreement import (
    PlanMismatchError,
    agree_everywhere,
    agree_on_grid,
    raise_together,
)
from megatron_muon.config import MuonConfig
from megatron_muon.exchange import Exchange, Meter
from megatron_muon.mcore import groups
from megatron_muon.mcore.distributed_optimizer import (
    MuonDistributedOptimizer,
    device_of,
    init_momentum,
    init_state_of,
    muon_over,
    owned_shards,
)
from megatron_muon.mcore.groups import Place
from megatron_muon.mcore.hooks import check_built
from megatron_muon.mcore.loss_scale import share_loss_scale
from megatron_muon.mcore.routing import Found, local_experts, muon_parameters, on_every_ep_rank
from megatron_muon.mcore.survey import survey
from megatron_muon.newton_schulz import torch_dtype
from megatron_muon.optimizer import DistributedMuon
from megatron_muon.phases import phases
from megatron_muon.report import start_line

# Model chunks whose dense part is frozen, so that only their experts' optimizer can speak of them.
_not_surveyed: weakref.WeakSet[Any] = weakref.WeakSet()


def make_muons(dist_opt: Any, config: MuonConfig, pg_collection: Any = None) -> None:
    """Make ``dist_opt`` a MuonDistributedOptimizer in place. Every rank of the world calls it.

    Args:
        dist_opt: Megatron's, fresh; a stub where nothing trains anywhere.
        config: the settings.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        SeamError: the DistributedOptimizer lacks an attribute that the plugin needs.
        PlanMismatchError: ranks disagree about the settings, or those of a stage about the plan.
        ValueError, NotImplementedError: a parameter cannot be routed, or a group is missing.
        RuntimeError: on ranks that have no error themselves when another has.
    """
    check_built(dist_opt)
    dist_opt.muon = None
    dist_opt.__class__ = MuonDistributedOptimizer
    device = device_of(dist_opt.model_chunks)
    agree_everywhere(plans.describe([], config), device)
    if dist_opt.is_stub_optimizer:  # the dense one, then on all ranks: Megatron gathers group keys
        share_loss_scale(dist_opt, with_experts=False)
        _not_surveyed.update(dist_opt.model_chunks)
        return
    place = groups.place_of(dist_opt, pg_collection, device)
    muon = _made_together(dist_opt, config, place)
    lines: list[str] = []
    if not place.experts or dist_opt.model_chunks[0] in _not_surveyed:
        _not_surveyed.difference_update(dist_opt.model_chunks)
        lines = survey(dist_opt, config, place)
    _put_inside(dist_opt, muon)
    dist_opt.ep_rank = place.coordinates.ep_rank
    dist_opt.local_experts = local_experts(dist_opt.model_chunks, place.sizes.ep)
    share_loss_scale(dist_opt, with_experts=place.experts)
    if place.speaks_for_stage:
        lines.append(
            start_line(
                muon.plan,
                stage=place.pipeline_rank,
                experts=place.experts,
                buckets=sum(len(buffer.buckets) for buffer in dist_opt.buffers),
            )
        )
    for line in lines:
        print(line, flush=True)


def _made_together(dist_opt: Any, config: MuonConfig, place: Place) -> DistributedMuon:
    """The Muon part of this rank; an error of any rank of the world is one of all of them."""
    muon: DistributedMuon | None = None
    error: Exception | None = None
    try:
        muon = _agreed_muon(dist_opt, config, place)
    except Exception as own:  # whatever it is, the other ranks must hear of it
        error = own
    raise_together(error, None, place.device)
    assert muon is not None
    return muon


def _agreed_muon(dist_opt: Any, config: MuonConfig, place: Place) -> DistributedMuon:
    """The Muon part of this rank, once every rank of the stage has said what it would do.

    An error of this rank waits until then, so that no other rank is left alone in the agreement.
    """
    found: Found = []
    error: Exception | None = None
    try:
        found = muon_parameters(
            dist_opt.model_chunks, dist_opt.buffers, place.sizes.tp, place.sizes.expert_tp, config
        )
        description = plans.describe([parameter for _, parameter in found], config)
    except Exception as routing_error:
        error = routing_error
        description = [*plans.describe([], config), f"error: {routing_error}"]
    try:
        grid = agree_on_grid(place.coordinates, description, place.stage, place.device)
    except PlanMismatchError as mismatch:
        raise error or mismatch from None
    if error is not None:
        raise error
    here = [parameter for _, parameter in found]
    ep_rank, ep_size = place.coordinates.ep_rank, place.coordinates.ep_size
    everywhere = on_every_ep_rank(here, ep_size, local_experts(dist_opt.model_chunks, ep_size))
    plan = plans.make_plan(everywhere, grid, config)
    rank, meter = dist.get_rank(place.stage), Meter()
    shards = dict(owned_shards(dist_opt))
    main_params = {
        index: shards[found[index - ep_rank * len(found)][0]] for index in plan.pieces(rank)
    }
    exchange = Exchange(plan, rank, place.stage, torch_dtype(config.ns_dtype), place.device, meter)
    phase = phases(lambda: dist_opt.config.timers)
    return DistributedMuon(config, plan, rank, exchange, main_params, meter, phase)


def _put_inside(dist_opt: Any, muon: DistributedMuon) -> None:
    dist_opt.muon = muon
    dist_opt.init_state_fn = init_state_of(dist_opt.init_state_fn, muon)
    dist_opt.optimizer.muon = muon
    adam: type[torch.optim.Optimizer] = type(dist_opt.optimizer)
    dist_opt.optimizer.__class__ = muon_over(adam)
    init_momentum(dist_opt.optimizer, muon)
