"""A rank's process groups that Muon's exchange needs: its stage, and its coordinates there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_muon.mcore.routing.param_routing import Weight
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.runtime.consensus import Coordinates

# Key: the group of the whole pipeline stage; value: its part inside this rank's optimizer instance.
_stages_of_instances: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a stage's model-parallel groups.

    Attributes:
        tp: number of ranks that share a dense weight.
        expert_tp: number of ranks that share an expert's weight.
        ep: number of ranks that a layer's experts are spread over.
    """

    tp: int
    expert_tp: int = 1
    ep: int = 1

    def tp_of(self, weight: Weight) -> int:
        """How many TP ranks share the weight."""
        return self.expert_tp if weight.is_expert else self.tp


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's pipeline stage, inside its optimizer instance.

    Attributes:
        group: its ranks, which exchange with each other.
        tp: the ranks that share a dense weight.
        expert_tp: the ranks that share an expert's weight; None in a dense model.
        ep: the ranks that a layer's experts are spread over; None in a dense model.
        pipeline_rank: the stage's number.
        instance: number of the distributed optimizer instance.
        device: device of the tensors that the groups communicate.
    """

    group: Group
    tp: Group
    expert_tp: Group | None
    ep: Group | None
    pipeline_rank: int
    instance: int
    device: torch.device

    @property
    def sizes(self) -> Sizes:
        """Sizes of the stage's model-parallel groups."""
        if self.expert_tp is None or self.ep is None:
            return Sizes(self.tp.size())
        return Sizes(self.tp.size(), self.expert_tp.size(), self.ep.size())

    @property
    def speaks(self) -> bool:
        """Whether this is the one rank that prints for the whole stage and all instances."""
        return dist.get_rank(self.group) == 0 and self.instance == 0

    def coordinates(self, dist_opt: Any) -> Coordinates:
        """The rank's coordinates in the groups of a DistributedOptimizer that is no stub."""
        dp = dist_opt.data_parallel_group
        if not has_experts(dist_opt):
            return Coordinates(0, 1, self.tp.rank(), self.tp.size(), dp.rank(), dp.size())
        assert self.expert_tp is not None and self.ep is not None
        return Coordinates(
            self.ep.rank(),
            self.ep.size(),
            self.expert_tp.rank(),
            self.expert_tp.size(),
            dp.rank(),
            dp.size(),
        )


def has_experts(dist_opt: Any) -> bool:
    """Whether an optimizer that is no stub is the experts', which are sharded over EP ranks."""
    return any(group["is_expert_parallel"] for group in dist_opt.optimizer.param_groups)


def stage_of(
    model_chunks: Sequence[Any], instance: int, pg_collection: Any, device: torch.device
) -> Stage:
    """The rank's stage; with several optimizer instances every rank of the world calls this.

    Args:
        model_chunks: this rank's model chunks.
        instance: number of the rank's distributed optimizer instance.
        pg_collection: as given to ``get_megatron_optimizer``; None for Megatron's global groups.
        device: device of the tensors that the groups communicate.

    Raises:
        ValueError: the collection lacks a group.
    """
    whole = _whole_stage(pg_collection)
    several = model_chunks[0].ddp_config.num_distributed_optimizer_instances > 1
    moe = _is_moe(model_chunks)
    return Stage(
        group=_of_instance(whole, instance, device) if several else whole,
        tp=_tp(pg_collection),
        expert_tp=_expert_tp(pg_collection) if moe else None,
        ep=_ep(pg_collection) if moe else None,
        pipeline_rank=_pipeline_rank(pg_collection),
        instance=instance,
        device=device,
    )


def require_groups(model_chunks: Sequence[Any], pg_collection: Any) -> None:
    """Check that each group that ``stage_of`` asks for is there; no communication.

    Raises:
        ValueError: the collection lacks a group.
    """
    _whole_stage(pg_collection)
    _tp(pg_collection)
    if _is_moe(model_chunks):
        _expert_tp(pg_collection)
        _ep(pg_collection)


def whole_stage(pg_collection: Any) -> Group:
    """The ranks of this pipeline stage, in all optimizer instances.

    Args:
        pg_collection: as given to ``get_megatron_optimizer``; None for Megatron's global groups.

    Raises:
        ValueError: the collection lacks the group.
    """
    return _whole_stage(pg_collection)


def tensor_parallel(pg_collection: Any) -> Group:
    """The ranks that share a dense weight; otherwise as ``whole_stage``."""
    return _tp(pg_collection)


def sharing(model_chunk: Any, pg_collection: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """TP sizes and numbers of shards of a grad buffer, each as (dense weights, experts' weights).

    Args:
        model_chunk: a model chunk, wrapped or not.
        pg_collection: as given to Megatron; None for its global groups.

    Raises:
        ValueError: the collection lacks a group.
    """
    moe = _is_moe([model_chunk])
    tp_sizes = _tp(pg_collection).size(), _expert_tp(pg_collection).size() if moe else 1
    return tp_sizes, (_shards(pg_collection), _expert_shards(pg_collection) if moe else 1)


def _shards(pg_collection: Any) -> int:
    """Number of shards of a dense weights' buffer, inside one optimizer instance."""
    if pg_collection is None:
        return int(
            parallel_state.get_data_parallel_world_size(
                with_context_parallel=True, partial_data_parallel=True
            )
        )
    inside: Group | None = getattr(pg_collection, "intra_dp_cp", None)
    return (inside or _given(pg_collection, "dp_cp", "needs to know who shards a buffer")).size()


def _expert_shards(pg_collection: Any) -> int:
    """Number of shards of an experts' buffer, inside one optimizer instance."""
    if pg_collection is None:
        return int(
            parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
        )
    inside: Group | None = getattr(pg_collection, "intra_expt_dp", None)
    return (inside or _given(pg_collection, "expt_dp", "needs to know who shards experts")).size()


def voters(dist_opts: Sequence[Any], stage: Stage) -> Group | None:
    """The ranks that are like this one: something trains there, or nothing. None for the world.

    Every rank of the world calls this.
    """
    only_stubs = all(dist_opt.is_stub_optimizer for dist_opt in dist_opts)
    flag = torch.tensor(only_stubs, device=stage.device)
    if not collectives.any_rank("muon/agree", flag, None):
        return None
    return collectives.split_world((int(only_stubs),), stage.group, stage.device)


def _whole_stage(pg_collection: Any) -> Group:
    """The ranks of this pipeline stage in all optimizer instances."""
    if pg_collection is None:
        group: Group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        return group
    return _given(pg_collection, "tp_dp_cp", "exchanges over a pipeline stage")


def _of_instance(whole: Group, instance: int, device: torch.device) -> Group:
    """The part of a stage inside one optimizer instance; the first call makes a new group."""
    if whole not in _stages_of_instances:
        color = (collectives.world_rank(0, whole), instance)
        _stages_of_instances[whole] = collectives.split_world(color, whole, device)
    return _stages_of_instances[whole]


def _tp(pg_collection: Any) -> Group:
    """The ranks that share a dense weight."""
    if pg_collection is None:
        group: Group = parallel_state.get_tensor_model_parallel_group()
        return group
    return _given(pg_collection, "tp", "needs to know who shares a weight")


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


def _is_moe(model_chunks: Sequence[Any]) -> bool:
    return bool(getattr(get_model_config(model_chunks[0]), "num_moe_experts", None))


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
