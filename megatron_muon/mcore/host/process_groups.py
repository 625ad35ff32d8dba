"""A rank's process groups: its pipeline stage, and its coordinates there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.runtime.consensus import Coordinates

# Key: the group of the whole pipeline stage; value: its part inside this rank's
# optimizer instance.
_stages_of_instances: weakref.WeakKeyDictionary[Any, Group] = (
    weakref.WeakKeyDictionary()
)


Chunks = Sequence[Any]  # a rank's part of the model, in Megatron's wrappers


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a stage's model-parallel groups."""

    tp: int  # number of ranks that share a dense weight
    expert_tp: int = 1  # number of ranks that share an expert's weight
    ep: int = 1  # number of ranks that a layer's experts are spread over


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's pipeline stage, inside its optimizer instance."""

    group: Group  # its ranks, which exchange with each other
    tp: Group  # the ranks that share a dense weight
    # the ranks that share an expert's weight; None in a dense model
    expert_tp: Group | None
    # the ranks that a layer's experts are spread over; None in a dense model
    ep: Group | None
    pipeline_rank: int  # the stage's number
    instance: int  # number of the distributed optimizer instance
    device: torch.device  # device of the tensors that the groups communicate

    @property
    def sizes(self) -> Sizes:
        """Sizes of the stage's model-parallel groups."""
        if self.expert_tp is None or self.ep is None:
            return Sizes(self.tp.size())
        return Sizes(self.tp.size(), self.expert_tp.size(), self.ep.size())

    @property
    def speaks(self) -> bool:
        """Whether this is the one rank that prints for the whole stage and all
        instances.
        """
        return dist.get_rank(self.group) == 0 and self.instance == 0

    def coordinates(self, dist_opt: Any) -> Coordinates:
        """The rank's coordinates in the groups of a DistributedOptimizer that is no
        stub.
        """
        ep_rank = 0
        ep_size = 1
        tp = self.tp
        if has_experts(dist_opt):
            assert self.expert_tp is not None and self.ep is not None
            ep_rank = self.ep.rank()
            ep_size = self.ep.size()
            tp = self.expert_tp
        dp = dist_opt.data_parallel_group
        return Coordinates(ep_rank, ep_size, tp.rank(), tp.size(), dp.rank(), dp.size())


def has_experts(dist_opt: Any) -> bool:
    """Whether an optimizer that is no stub is the experts', which are sharded over EP
    ranks.
    """
    return any(group["is_expert_parallel"] for group in dist_opt.optimizer.param_groups)


# By a group's name in a pg_collection: why Muon needs it, and Megatron's global one.
_GROUPS: dict[str, tuple[str, Callable[[], Group]]] = {
    "tp_dp_cp": (
        "exchanges over a pipeline stage",
        lambda: parallel_state.get_tensor_and_data_parallel_group(
            with_context_parallel=True
        ),
    ),
    "tp": (
        "needs to know who shares a weight",
        lambda: parallel_state.get_tensor_model_parallel_group(),
    ),
    "expt_tp": (
        "needs to know who shares an expert",
        lambda: parallel_state.get_expert_tensor_parallel_group(),
    ),
    "ep": (
        "needs to know who has which experts",
        lambda: parallel_state.get_expert_model_parallel_group(),
    ),
    "dp_cp": (
        "needs to know who shards a buffer",
        lambda: parallel_state.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        ),
    ),
    "pp": (
        "chooses buckets of the first pipeline stage",
        lambda: parallel_state.get_pipeline_model_parallel_group(),
    ),
}


def group_of(name: str, pg_collection: Any) -> Group:
    """One of a rank's groups, by its name in a pg_collection; None for Megatron's
    global ones.

    ``tp_dp_cp`` are the ranks of the pipeline stage, in all optimizer instances.
    ``dp_cp`` shard a buffer, inside one instance. Of several pipelines ``pp`` is the
    first one.

    Raises:
        ValueError: the collection lacks the group.
    """
    purpose, global_group = _GROUPS[name]
    group: Any = None
    if pg_collection is None:
        group = global_group()
    # the part of a group inside one optimizer instance comes first
    for own_name in (f"intra_{name}", name):
        if group is None:
            group = getattr(pg_collection, own_name, None)
    if group is None:
        raise ValueError(
            f"optimizer='muon' {purpose}: give the pg_collection its {name} group, or "
            "pass none to use Megatron's global groups"
        )
    first: Group = group[0] if isinstance(group, list) else group
    return first


def stage_of(
    model_chunks: Chunks, instance: int, pg_collection: Any, device: torch.device
) -> Stage:
    """The rank's stage; with several optimizer instances every rank of the world calls
    this.
    """
    group = group_of("tp_dp_cp", pg_collection)
    if model_chunks[0].ddp_config.num_distributed_optimizer_instances > 1:
        group = _of_instance(group, instance, device)
    moe = is_moe(model_chunks)
    pipeline_rank = 0
    if pg_collection is None or hasattr(pg_collection, "pp"):
        pipeline_rank = group_of("pp", pg_collection).rank()
    return Stage(
        group=group,
        tp=group_of("tp", pg_collection),
        expert_tp=group_of("expt_tp", pg_collection) if moe else None,
        ep=group_of("ep", pg_collection) if moe else None,
        pipeline_rank=pipeline_rank,
        instance=instance,
        device=device,
    )


def require_groups(model_chunks: Chunks, pg_collection: Any) -> None:
    """Raise a ValueError if the collection lacks a group of ``stage_of``'s; no
    communication.
    """
    of_experts = ("expt_tp", "ep") if is_moe(model_chunks) else ()
    for name in ("tp_dp_cp", "tp", *of_experts):
        group_of(name, pg_collection)


def is_moe(model_chunks: Chunks) -> bool:
    """Whether the model has routed experts."""
    return local_experts(model_chunks, 1) > 0


def local_experts(model_chunks: Chunks, ep_size: int) -> int:
    """Experts of a layer on one EP rank; 0 in a dense model."""
    experts = getattr(get_model_config(model_chunks[0]), "num_moe_experts", None)
    return (experts or 0) // ep_size


def group_sizes(model_chunk: Any, pg_collection: Any) -> Sizes:
    """Sizes of the model-parallel groups of a chunk that no optimizer has yet.

    ``group_of`` has the arguments and errors.
    """
    of_experts = ("expt_tp", "ep") if is_moe([model_chunk]) else ()
    names = ("tp", *of_experts)
    return Sizes(*(group_of(name, pg_collection).size() for name in names))


def voters(dist_opts: Sequence[Any], stage: Stage) -> Group | None:
    """All ranks that train something if this rank does, else all that train nothing.

    None is the world, where every rank trains something. Every rank of the world calls
    this.
    """
    only_stubs = all(dist_opt.is_stub_optimizer for dist_opt in dist_opts)
    flag = torch.tensor(only_stubs, device=stage.device)
    if not collectives.any_rank("muon/agree", flag, None):
        return None
    return collectives.split_world((int(only_stubs),), stage.group, stage.device)


def _of_instance(whole: Group, instance: int, device: torch.device) -> Group:
    """The part of a stage inside one optimizer instance; the first call makes a new
    group.
    """
    if whole not in _stages_of_instances:
        color = (collectives.world_rank(0, whole), instance)
        _stages_of_instances[whole] = collectives.split_world(color, whole, device)
    return _stages_of_instances[whole]
