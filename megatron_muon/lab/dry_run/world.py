"""A run's ranks without the run: fake process groups, and parameters that have no
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.planning.grid import RankGrid, neighbours_of
from megatron_muon.runtime.consensus import Coordinates, grid_of
from megatron_muon.runtime.patches import replaced

META = torch.device("meta")


@contextmanager
def as_rank(rank: int, ranks: Ranks, **options: Any) -> Iterator[None]:
    """Be one rank of the world, with Megatron's groups around it; their collectives do
    nothing.

    ``options`` are further arguments of ``initialize_model_parallel``.
    """
    dist.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=ranks.world
    )
    try:
        with _only_own_groups(rank):
            initialize_groups(ranks, create_gloo_process_groups=False, **options)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def initialize_groups(ranks: Ranks, **options: Any) -> None:
    """Megatron's process groups, over a world that is up; ``options`` as in
    ``as_rank``.
    """
    parallel_state.initialize_model_parallel(
        ranks.tp,
        ranks.pp,
        ranks.chunks,
        context_parallel_size=ranks.cp,
        expert_model_parallel_size=ranks.ep,
        num_distributed_optimizer_instances=ranks.instances,
        expert_tensor_parallel_size=ranks.expert_tp,
        order=ranks.order,
        **options,
    )


@contextmanager
def without_memory() -> Iterator[None]:
    """New parameters and gradient buffers are on the meta device: shapes and marks, no
    elements.

    Megatron names ``torch.cuda.current_device()`` for most of them; for the time of the
    build it is the meta device. Torch's own modules name none: their parameters are
    replaced as they are registered. Initialization needs the seeds of Megatron's RNG
    tracker all the same.
    """
    model_parallel_cuda_manual_seed(0)
    with replaced(torch.cuda, current_device=lambda: META):
        hook = register_module_parameter_registration_hook(_on_meta)
        try:
            yield
        finally:
            hook.remove()


def _on_meta(
    module: torch.nn.Module, name: str, param: torch.nn.Parameter | None
) -> Any:
    if param is None or param.is_meta:
        return None  # as it is
    replaced = torch.nn.Parameter(param.data.to(META), param.requires_grad)
    replaced.__dict__.update(param.__dict__)
    return replaced


def first_ranks(ranks: Ranks) -> list[int]:
    """The rank of each pipeline stage that is first in all other respects."""
    return list(_dense(ranks).get_ranks("pp")[0])


def whole_stage() -> list[int]:
    """World ranks of the stage that this rank is in, in all optimizer instances."""
    group = parallel_state.get_tensor_and_data_parallel_group(
        with_context_parallel=True
    )
    return list(dist.get_process_group_ranks(group))


def stage_ranks(ranks: Ranks, instance: int = 0) -> list[int]:
    """World ranks of the stage that this rank is in, as its group numbers them, in an
    instance.
    """
    dp_place = _places(_dense(ranks), "dp-cp")
    dp_size = ranks.world // (ranks.tp * ranks.pp * ranks.instances)
    return [rank for rank in whole_stage() if dp_place[rank] // dp_size == instance]


def grid(ranks: Ranks, node_ranks: int, *, experts: bool) -> RankGrid:
    """The ranks of ``stage_ranks`` as the optimizer of dense weights, or of experts,
    sees them.
    """
    generator = _experts(ranks) if experts else _dense(ranks)
    tp_size, ep_size = (ranks.expert_tp, ranks.ep) if experts else (ranks.tp, 1)
    dp_size = ranks.world // (tp_size * ep_size * ranks.pp * ranks.instances)
    tp, ep, dp = (_places(generator, token) for token in ("tp", "ep", "dp-cp"))
    every = (stage_ranks(ranks, instance) for instance in range(ranks.instances))
    near = min(neighbours_of([rank // node_ranks for rank in part]) for part in every)
    places = (
        (ep[r], ep_size, tp[r], tp_size, dp[r], dp_size) for r in stage_ranks(ranks)
    )
    return grid_of([Coordinates(*each) for each in places], near)


def _dense(ranks: Ranks) -> Any:
    dp = ranks.world // (ranks.tp * ranks.cp * ranks.pp)
    return RankGenerator(
        tp=ranks.tp, ep=1, dp=dp, pp=ranks.pp, cp=ranks.cp, order=ranks.order
    )


def _experts(ranks: Ranks) -> Any:
    tp, ep, pp = ranks.expert_tp, ranks.ep, ranks.pp
    dp = ranks.world // (tp * ep * pp)
    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=1, order=ranks.order)


def _places(generator: Any, token: str) -> dict[int, int]:
    """The place of each rank in its group; torch sorts the ranks of a group."""
    places: dict[int, int] = {}
    for group in generator.get_ranks(token):
        places |= {rank: place for place, rank in enumerate(sorted(group))}
    return places


@contextmanager
def _only_own_groups(rank: int) -> Iterator[None]:
    """Pass over the groups that the rank is not in, whose handle it could not use
    anyway.

    Megatron has every rank make every group, thousands in a large world.
    """
    create_group = parallel_state.create_group

    def create_own_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return create_group(ranks, *args, **kwargs)

    with replaced(parallel_state, create_group=create_own_group):
        yield
