"""The process groups of a rank that Muon's exchange needs: its stage, and where it stands in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_muon import collectives
from megatron_muon.agreement import Coordinates
from megatron_muon.collectives import Group

# By the group of the whole pipeline stage: the part of it inside this rank's optimizer instance.
_stages_of_instances: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks of a stage share what.

    Attributes:
        tp: a dense weight.
        expert_tp: an expert's weight.
        ep: a layer's experts.
    """

    tp: int
    expert_tp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands, as one DistributedOptimizer sees it.

    Attributes:
        stage: the ranks that it exchanges with.
        coordinates: within the stage.
        sizes: of the stage's groups.
        experts: the optimizer is that of experts that are sharded over EP ranks.
        pipeline_rank: the stage's number.
        instance: number of the distributed optimizer instance.
        device: that the groups communicate from.
    """

    stage: Group
    coordinates: Coordinates
    sizes: Sizes
    experts: bool
    pipeline_rank: int
    instance: int
    device: torch.device

    @property
    def speaks_for_stage(self) -> bool:
        """The one rank that prints what is true of the whole stage in all instances."""
        return dist.get_rank(self.stage) == 0 and self.instance == 0


def place_of(dist_opt: Any, pg_collection: Any, device: torch.device) -> Place:
    """The rank's place; with several optimizer instances every rank of the world calls this.

    Args:
        dist_opt: Megatron's, not a stub.
        pg_collection: as given to ``get_megatron_optimizer``; None for Megatron's global groups.
        device: that the groups communicate from.

    Raises:
        ValueError: the collection lacks a group.
    """
    experts = any(group["is_expert_parallel"] for group in dist_opt.optimizer.param_groups)
    tp, dp = dist_opt.tp_group, dist_opt.data_parallel_group
    if _is_moe(dist_opt):
        expert_tp, ep = _expert_tp(pg_collection), _ep(pg_collection)
        sizes = Sizes(tp.size(), expert_tp.size(), ep.size())
    else:
        sizes = Sizes(tp.size())
    if experts:
        coordinates = Coordinates(
            ep.rank(), ep.size(), expert_tp.rank(), expert_tp.size(), dp.rank(), dp.size()
        )
    else:
        coordinates = Coordinates(0, 1, tp.rank(), tp.size(), dp.rank(), dp.size())
    return Place(
        stage=_stage(dist_opt, pg_collection, device),
        coordinates=coordinates,
        sizes=sizes,
        experts=experts,
        pipeline_rank=_pipeline_rank(pg_collection),
        instance=int(dist_opt.distributed_optimizer_instance_id),
        device=device,
    )


def _stage(dist_opt: Any, pg_collection: Any, device: torch.device) -> Group:
    """The ranks of this pipeline stage, inside this rank's optimizer instance.

    With one instance this is Megatron's group. With several the first call makes a new one.
    """
    if pg_collection is None:
        stage: Group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    else:
        stage = _given(pg_collection, "tp_dp_cp", "exchanges over a pipeline stage")
    if dist_opt.model_chunks[0].ddp_config.num_distributed_optimizer_instances == 1:
        return stage
    if stage not in _stages_of_instances:
        color = (
            collectives.world_rank(0, stage),
            int(dist_opt.distributed_optimizer_instance_id),
        )
        _stages_of_instances[stage] = collectives.split_world(color, stage, device)
    return _stages_of_instances[stage]


def _expert_tp(pg_collection: Any) -> Group:
    """The ranks that share an expert's weights."""
    if pg_collection is None:
        group: Group = parallel_state.get_expert_tensor_parallel_group()
        return group
    return _given(pg_collection, "expt_tp", "needs to know who shares an expert")


def _ep(pg_collection: Any) -> Group:
    """The ranks that a layer's experts are spread over."""
    if pg_collection is None:
        group: Group = parallel_state.get_expert_model_parallel_group()
        return group
    return _given(pg_collection, "ep", "needs to know who has which experts")


def _is_moe(dist_opt: Any) -> bool:
    return bool(getattr(get_model_config(dist_opt.model_chunks[0]), "num_moe_experts", None))


def _pipeline_rank(pg_collection: Any) -> int:
    if pg_collection is None:
        return int(parallel_state.get_pipeline_model_parallel_rank())
    return pg_collection.pp.rank() if hasattr(pg_collection, "pp") else 0


def _given(pg_collection: Any, name: str, purpose: str) -> Group:
    group: Group | None = getattr(pg_collection, name, None)
    if group is None:
        raise ValueError(
            f"optimizer='muon' {purpose}: give the pg_collection its {name} group, or pass none to "
            "use Megatron's global groups"
        )
    return group
