"""Turning a DistributedOptimizer that Megatron has just built around Adam into Muon's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_muon import plan as plans
from megatron_muon.agreement import (
    Coordinates,
    PlanMismatchError,
    agree_on_grid,
    raise_together,
)
from megatron_muon.config import MuonConfig
from megatron_muon.exchange import Exchange, Meter
from megatron_muon.layout import Parameter
from megatron_muon.mcore.distributed_optimizer import (
    MuonDistributedOptimizer,
    device_of,
    init_momentum,
    init_state_of,
    muon_over,
    owned_shards,
)
from megatron_muon.mcore.hooks import check_built
from megatron_muon.mcore.routing import muon_parameters, named_parameters
from megatron_muon.newton_schulz import torch_dtype
from megatron_muon.optimizer import DistributedMuon
from megatron_muon.report import start_line

Found = list[tuple[torch.nn.Parameter, Parameter]]


def make_muons(dist_opt: Any, config: MuonConfig, pg_collection: Any = None) -> None:
    """Make ``dist_opt`` a MuonDistributedOptimizer in place. Every rank of the world calls it.

    Args:
        dist_opt: Megatron's, fresh; a stub where nothing trains anywhere.
        config: the settings.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        SeamError: the DistributedOptimizer lacks an attribute that the plugin needs.
        PlanMismatchError: ranks of a stage disagree.
        ValueError, NotImplementedError: a parameter cannot be routed, or a group is missing.
        RuntimeError: on ranks that have no error themselves when another has.
    """
    check_built(dist_opt)
    device = device_of(dist_opt)
    muon: DistributedMuon | None = None
    error: Exception | None = None
    if not dist_opt.is_stub_optimizer:
        try:
            muon = _agreed_muon(dist_opt, config, _stage_group(pg_collection), device)
        except Exception as own:  # whatever it is, the other ranks must hear of it
            error = own
    raise_together(error, dist_opt.get_grad_stats_parallel_group(), device)
    dist_opt.muon = muon
    dist_opt.__class__ = MuonDistributedOptimizer
    if muon is not None:
        _put_inside(dist_opt, muon)
        if dist.get_rank(_stage_group(pg_collection)) == 0:
            print(_start_line(dist_opt, muon.plan, _pipeline_rank(pg_collection)), flush=True)


def _agreed_muon(
    dist_opt: Any, config: MuonConfig, group: Any, device: torch.device
) -> DistributedMuon:
    """The Muon part of this rank, once every rank of the stage has said what it would do.

    An error of this rank waits until then, so that no other rank is left alone in the agreement.
    """
    tp_group, dp_group = dist_opt.tp_group, dist_opt.data_parallel_group
    found: Found = []
    error: Exception | None = None
    try:
        found = muon_parameters(dist_opt.model_chunks, dist_opt.buffers, tp_group.size(), config)
        description = plans.describe([parameter for _, parameter in found], config)
    except Exception as routing_error:
        error = routing_error
        description = [*plans.describe([], config), f"error: {routing_error}"]
    coordinates = Coordinates(tp_group.rank(), tp_group.size(), dp_group.rank(), dp_group.size())
    try:
        grid = agree_on_grid(coordinates, description, group, device)
    except PlanMismatchError as mismatch:
        raise error or mismatch from None
    if error is not None:
        raise error
    plan = plans.make_plan([parameter for _, parameter in found], grid, config)
    rank, meter = dist.get_rank(group), Meter()
    shards = dict(owned_shards(dist_opt))
    main_params = {index: shards[found[index][0]] for index in plan.pieces(rank)}
    exchange = Exchange(plan, rank, group, torch_dtype(config.ns_dtype), device, meter)
    return DistributedMuon(config, plan, rank, exchange, main_params, meter)


def _put_inside(dist_opt: Any, muon: DistributedMuon) -> None:
    dist_opt.init_state_fn = init_state_of(dist_opt.init_state_fn, muon)
    dist_opt.optimizer.muon = muon
    adam: type[torch.optim.Optimizer] = type(dist_opt.optimizer)
    dist_opt.optimizer.__class__ = muon_over(adam)
    init_momentum(dist_opt.optimizer, muon)


def _stage_group(pg_collection: Any) -> Any:
    """The ranks of this pipeline stage: of the given groups, or of Megatron's global ones."""
    if pg_collection is None:
        return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if getattr(pg_collection, "tp_dp_cp", None) is None:
        raise ValueError(
            "optimizer='muon' exchanges over a pipeline stage: give the pg_collection its tp_dp_cp "
            "group, or pass none to use Megatron's global groups"
        )
    return pg_collection.tp_dp_cp


def _pipeline_rank(pg_collection: Any) -> int:
    if pg_collection is None:
        return int(parallel_state.get_pipeline_model_parallel_rank())
    return pg_collection.pp.rank() if hasattr(pg_collection, "pp") else 0


def _start_line(dist_opt: Any, plan: plans.ExchangePlan, stage: int) -> str:
    trainable = {
        param for _, param in named_parameters(dist_opt.model_chunks) if param.requires_grad
    }
    return start_line(
        plan,
        stage=stage,
        trainable_elements=sum(param.numel() for param in trainable),
        buckets=sum(len(buffer.buckets) for buffer in dist_opt.buffers),
    )
