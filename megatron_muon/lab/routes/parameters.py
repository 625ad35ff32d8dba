"""A run's treatment of every parameter of every pipeline stage, by the code that the
run runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.model import Ranks, ranks_of
from megatron_muon.lab.dry_run.stages import (
    Planned,
    as_rank,
    built,
    planned_optimizers,
    sizes_of,
)
from megatron_muon.mcore.host.process_groups import Sizes, local_experts
from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.multipliers import multipliers_of
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    is_cut,
    weights,
    why_adamw,
)
from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.routing.survey import (
    matched_patterns,
    require_matched,
    share_of,
    unknown_lines,
)
from megatron_muon.planning.describe import Share, homes_lines, share_lines, start_line
from megatron_muon.rules.muon import update_scale
from megatron_muon.settings.config import MuonConfig

Split = Literal["rows", "columns", "replicated", "whole"]


@dataclass(frozen=True, slots=True)
class Routed:
    """A matrix."""

    name: str  # the parameter's, with the part in brackets where it holds several
    rows: int  # over all TP ranks
    cols: int
    scale: float  # factor of its orthogonalized update, update_scale
    home: int  # rank of the stage that orthogonalizes it


@dataclass(frozen=True, slots=True)
class RoutedParameter:
    """A parameter of a stage."""

    name: str  # Megatron's, with layers and experts numbered over all ranks
    shape: tuple[int, ...]  # one TP rank's
    tp: Split  # what TP ranks hold: ranges of rows or of columns, or replicas
    ep_rank: int | None  # of an expert's parameter, where there are several
    optimizer: Literal["muon", "adamw"]
    reason: str | None  # why AdamW has it; None where Muon does
    lr_mult: float
    wd_mult: float
    matrices: tuple[Routed, ...] = ()  # Muon's


@dataclass(frozen=True, slots=True)
class RoutedStage:
    """A pipeline stage."""

    stage: int  # its number
    # of the world, in the order of the stage; of the first instance
    ranks: tuple[int, ...]
    lines: tuple[str, ...]  # those that a run prints about the stage at its start
    # all of them, those of an expert on every EP rank
    parameters: tuple[RoutedParameter, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """A model's routes, over all stages; ``lines`` are what a run prints about the
    model.
    """

    ranks: Ranks
    lines: tuple[str, ...]
    stages: tuple[RoutedStage, ...]


def routes(flags: Namespace, config: MuonConfig) -> Routes:
    """Build one rank of each pipeline stage, without memory for parameters, and ask the
    plugin.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin finds something wrong, as they would in the run.
    """
    ranks = ranks_of(flags)
    sizes = sizes_of(flags, ranks)
    matched: set[str] = set()
    stages: list[RoutedStage] = []
    share = Share()
    for number, rank in enumerate(world.first_ranks(ranks)):
        with as_rank(rank, flags, ranks):
            chunks = built(flags, config, ranks)
            planned = planned_optimizers(flags, config, ranks, chunks)
            stages.append(_stage(number, planned, chunks, config, sizes, ranks))
            matched |= matched_patterns(chunks, sizes, config)
            share += share_of(routes_of(chunks, sizes, config), config)
    require_matched(matched, config)
    several = ranks.world > ranks.pp * ranks.instances  # ranks of a stage
    lines = [*share_lines(share), *(homes_lines(config) if several else ())]
    return Routes(ranks, tuple(lines), tuple(stages))


def _stage(
    number: int,
    optimizers: Sequence[Planned],
    chunks: Sequence[Any],
    config: MuonConfig,
    sizes: Sizes,
    ranks: Ranks,
) -> RoutedStage:
    matrices: dict[tuple[str, int], tuple[Routed, ...]] = {}  # by parameter and EP rank
    on_ep_ranks: set[Any] = set()
    lines = list(unknown_lines(routes_of(chunks, sizes, config)))
    for at, planned in enumerate(optimizers):
        matrices |= _matrices(planned, config)
        if planned.experts:
            on_ep_ranks.update(*(buffer.param_index_map for buffer in planned.buffers))
        buckets = [len(buffer.buckets) for buffer in planned.buffers]
        earlier = [one.plan for one in optimizers[:at]]
        plan, experts = planned.plan, planned.experts
        lines += [
            start_line(
                plan, stage=number, experts=experts, buckets=buckets, earlier=earlier
            )
        ]
    parameters: list[RoutedParameter] = []
    for weight in weights(chunks):
        ep_size = sizes.ep if weight.param in on_ep_ranks else 1
        names = [
            expert_name(weight.name, ep, local_experts(chunks, ep_size))
            for ep in range(ep_size)
        ]
        tp_size = weight.tp_size(sizes)
        reason = why_adamw(weight, tp_size, config)
        parameters += [
            RoutedParameter(
                name,
                tuple(weight.param.shape),
                _split(weight, tp_size, config, reason),
                ep_rank if weight.param in on_ep_ranks else None,
                "muon" if reason is None else "adamw",
                reason,
                *multipliers_of(weight, config),
                matrices[name, ep_rank] if reason is None else (),
            )
            for ep_rank, name in enumerate(names)
        ]
    members = tuple(world.stage_ranks(ranks))
    return RoutedStage(number, members, tuple(lines), tuple(parameters))


def _matrices(
    planned: Planned, config: MuonConfig
) -> dict[tuple[str, int], tuple[Routed, ...]]:
    """Matrices by their parameter's name and EP rank."""
    matrices = iter(planned.plan.matrices)
    return {
        (parameter.name, parameter.ep_rank): tuple(
            Routed(m.name, *m.unit, update_scale(*m.whole, config), m.home)
            for m in (next(matrices) for _ in parameter.matrices)
            for _ in range(m.units)
        )
        for parameter in planned.plan.parameters
    }


def _split(
    weight: Weight, tp_size: int, config: MuonConfig, reason: str | None
) -> Split:
    if tp_size == 1:
        return "whole"
    if reason is None:
        dim = matrices_of(weight, tp_size, replace(config, splits=())).partition_dim
    elif is_cut(weight):
        # state-space layers mark what TP ranks have a range of, and do not say along
        # which dim
        dim = max(0, getattr(weight.param, "partition_dim", 0))
    else:
        dim = None
    return "replicated" if dim is None or dim < 0 else ("rows", "columns")[dim]
