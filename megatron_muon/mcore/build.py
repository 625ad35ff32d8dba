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
    init_momentum,
    init_state_of,
    muon_over,
)
from megatron_muon.mcore.routing import muon_parameters, named_parameters
from megatron_muon.newton_schulz import torch_dtype
from megatron_muon.optimizer import DistributedMuon
from megatron_muon.report import start_line

Found = list[tuple[torch.nn.Parameter, Parameter]]


def make_muons(dist_opt: Any, config: MuonConfig, pg_collection: Any = None) -> None:
    """Make ``dist_opt`` a MuonDistributedOptimizer in place. Every rank of the world calls it.

    Args:
        dist_opt: Megatron's, fresh; a stub where this rank has no trainable parameters.
        config: the settings.
        pg_collection: the process groups given to ``get_megatron_optimizer``, if any.

    Raises:
        PlanMismatchError: ranks of a stage disagree.
        ValueError, NotImplementedError: a parameter cannot be routed.
        RuntimeError: on ranks that have no error themselves when another has.
    """
    device = next(dist_opt.model_chunks[0].parameters()).device
    muon: DistributedMuon | None = None
    error: Exception | None = None
    if not dist_opt.is_stub_optimizer:
        try:
            muon = _agreed_muon(dist_opt, config, _stage_group(pg_collection), device)
        except (ValueError, NotImplementedError, PlanMismatchError) as own:
            error = own
    raise_together(error, dist_opt.get_grad_stats_parallel_group(), device)
    dist_opt.muon = muon
    dist_opt.__class__ = MuonDistributedOptimizer
    if muon is not None:
        _put_inside(dist_opt, muon)
        if dist.get_rank(_stage_group(pg_collection)) == 0:
            print(_start_line(dist_opt, muon.plan), flush=True)


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
    except (ValueError, NotImplementedError) as routing_error:
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
    main_params = {index: _main_param(dist_opt, found[index][0]) for index in plan.pieces(rank)}
    exchange = Exchange(plan, rank, group, torch_dtype(config.ns_dtype), device, meter)
    return DistributedMuon(config, plan, rank, exchange, main_params, meter)


def _put_inside(dist_opt: Any, muon: DistributedMuon) -> None:
    dist_opt.init_state_fn = init_state_of(dist_opt.init_state_fn, muon)
    dist_opt.optimizer.muon = muon
    adam: type[torch.optim.Optimizer] = type(dist_opt.optimizer)
    dist_opt.optimizer.__class__ = muon_over(adam)
    init_momentum(dist_opt.optimizer, muon)


def _main_param(dist_opt: Any, param: torch.nn.Parameter) -> torch.Tensor:
    """The flat fp32 shard of a parameter: a copy for bf16 parameters, a view of an fp32 one.

    By identity: a group that mixes both is misnumbered in ``model_param_group_index_map``.
    """
    for models, mains in (
        (dist_opt.model_float16_groups, dist_opt.shard_fp32_from_float16_groups),
        (dist_opt.model_fp32_groups, dist_opt.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            for model_param, main in zip(model_group, main_group, strict=True):
                if model_param is param:
                    assert isinstance(main, torch.Tensor)
                    return main
    raise ValueError(f"the plan has a piece of {tuple(param.shape)} that Megatron has not here")


def _stage_group(pg_collection: Any) -> Any:
    group = getattr(pg_collection, "tp_dp_cp", None)
    return group or parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def _start_line(dist_opt: Any, plan: plans.ExchangePlan) -> str:
    trainable = {
        param for _, param in named_parameters(dist_opt.model_chunks) if param.requires_grad
    }
    return start_line(
        plan,
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        trainable_elements=sum(param.numel() for param in trainable),
        buckets=sum(len(buffer.buckets) for buffer in dist_opt.buffers),
    )
