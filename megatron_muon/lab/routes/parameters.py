"""A run's treatment of every parameter of every pipeline stage, by the code that the run runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.model import Ranks, ranks_of
from megatron_muon.lab.dry_run.stages import (
    as_rank,
    built,
    planned_optimizers,
    sizes_of,
)
from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.multipliers import Multipliers, multipliers_of
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
from megatron_muon.mcore.wiring.buffers.placement import local_experts
from megatron_muon.mcore.wiring.process_groups import Sizes
from megatron_muon.planning.describe import Share, share_lines, start_line
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.runtime.update import update_scale
from megatron_muon.settings.config import MuonConfig

Split = Literal["rows", "columns", "replicated", "whole"]


@dataclass(frozen=True, slots=True)
class Routed:
    """A matrix: whole size, factor of its orthogonalized update, and who orthogonalizes it.

    Attributes:
        name: the parameter's, with the part in brackets where it holds several.
        rows, cols: over all TP ranks.
        scale: ``update_scale`` of it.
        home: rank of the stage.
    """

    name: str
    rows: int
    cols: int
    scale: float
    home: int


@dataclass(frozen=True, slots=True)
class RoutedParameter:
    """A parameter of a stage.

    Attributes:
        name: Megatron's, with layers and experts numbered over all ranks.
        shape: one TP rank's.
        tp: the parts of a matrix that TP ranks hold: ranges of rows or of columns, or replicas. All
            of it where there is one TP rank.
        ep_rank: the EP rank of an expert's parameter, where there are several; None for others.
        reason: why AdamW has it; None where Muon does.
        multipliers: of its learning rate and its weight decay, by ``lr_mults`` and
            ``wd_mults``.
        matrices: Muon's.
    """

    name: str
    shape: tuple[int, ...]
    tp: Split
    ep_rank: int | None
    reason: str | None
    multipliers: Multipliers
    matrices: tuple[Routed, ...] = ()

    @property
    def optimizer(self) -> Literal["muon", "adamw"]:
        return "muon" if self.reason is None else "adamw"


@dataclass(frozen=True, slots=True)
class RoutedStage:
    """A pipeline stage.

    Attributes:
        number: pipeline rank.
        ranks: ranks of the world, by their number in the stage; with several optimizer instances,
            those of the first one.
        rows: every parameter, those of an expert's on every EP rank.
        share: Muon's share of it.
        lines: those that a run prints about the stage at its start.
        plan_seconds: processor time of making its exchange plans.
    """

    number: int
    ranks: tuple[int, ...]
    rows: tuple[RoutedParameter, ...]
    share: Share
    lines: tuple[str, ...]
    plan_seconds: float


@dataclass(frozen=True, slots=True)
class Routes:
    """A model's routes, over all stages; ``lines`` are what a run prints about the model."""

    stages: tuple[RoutedStage, ...]
    lines: tuple[str, ...]
    ranks: Ranks


@dataclass
class _Planned:
    """From the plans of a stage's optimizers: matrices by parameter name and EP rank."""

    matrices: dict[tuple[str, int], tuple[Routed, ...]] = field(default_factory=dict)
    on_ep_ranks: set[Any] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0


def routes(flags: Namespace, config: MuonConfig) -> Routes:
    """Build one rank of each pipeline stage, without memory for parameters, and ask the plugin.

    Args:
        flags: of ``dry_run.flags``, or a script's arguments.
        config: the settings.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the plugin finds
            something wrong, as they would in the run.
    """
    ranks = ranks_of(flags)
    matched: set[str] = set()
    stages = []
    for number, rank in enumerate(world.first_ranks(ranks)):
        with as_rank(rank, flags, ranks):
            chunks = built(flags, config, ranks)
            stages.append(_stage(flags, config, ranks, number, chunks))
            matched |= matched_patterns(chunks, sizes_of(flags, ranks), config)
    require_matched(matched, config)
    lines = share_lines(sum((stage.share for stage in stages), start=Share()))
    return Routes(tuple(stages), tuple(lines), ranks)


def _stage(
    flags: Namespace, config: MuonConfig, ranks: Ranks, number: int, chunks: Sequence[Any]
) -> RoutedStage:
    planned_here = _Planned()
    earlier: list[ExchangePlan] = []
    for planned in planned_optimizers(flags, config, ranks, chunks):
        planned_here.seconds += planned.seconds
        _take(planned_here, planned.plan, config)
        if planned.experts:
            of_buffers = (buffer.param_index_map for buffer in planned.buffers)
            planned_here.on_ep_ranks |= {param for params in of_buffers for param in params}
        buckets = [len(buffer.buckets) for buffer in planned.buffers]
        line = start_line(
            planned.plan,
            stage=number,
            experts=planned.experts,
            buckets=buckets,
            earlier=earlier,
        )
        earlier.append(planned.plan)
        planned_here.lines.append(line)
    sizes = sizes_of(flags, ranks)
    here = routes_of(chunks, sizes, config)
    return RoutedStage(
        number=number,
        ranks=tuple(world.stage_ranks(ranks)),
        rows=tuple(
            row
            for weight in weights(chunks)
            for row in _rows(weight, planned_here, config, sizes, chunks)
        ),
        share=share_of(here, config),
        lines=(*unknown_lines(here), *planned_here.lines),
        plan_seconds=planned_here.seconds,
    )


def _take(planned: _Planned, plan: ExchangePlan, config: MuonConfig) -> None:
    matrices = iter(plan.matrices)
    for parameter in plan.parameters:
        planned.matrices[parameter.name, parameter.ep_rank] = tuple(
            Routed(m.name, *m.unit, update_scale(*m.whole, config), m.home)
            for m in (next(matrices) for _ in parameter.matrices)
            for _ in range(m.units)
        )


def _rows(
    weight: Weight, planned: _Planned, config: MuonConfig, sizes: Sizes, chunks: Sequence[Any]
) -> list[RoutedParameter]:
    """The parameter, once for each EP rank that has one of its own."""
    on_ep_ranks = weight.param in planned.on_ep_ranks
    tp_size = sizes.tp_of(weight)
    reason = why_adamw(weight, tp_size, config)
    if reason is None:
        tp = _split(matrices_of(weight, tp_size, config).partition_dim, tp_size)
    else:
        tp = _split_by_mark(weight, tp_size)
    ep_size = sizes.ep if on_ep_ranks else 1
    multipliers = multipliers_of(weight, config)
    rows = []
    for ep_rank in range(ep_size):
        name = expert_name(weight.name, ep_rank, local_experts(chunks, ep_size))
        matrices = planned.matrices[name, ep_rank] if reason is None else ()
        number = ep_rank if on_ep_ranks else None
        shape = tuple(weight.param.shape)
        rows.append(RoutedParameter(name, shape, tp, number, reason, multipliers, matrices))
    return rows


def _split_by_mark(weight: Weight, tp_size: int) -> Split:
    if not is_cut(weight):
        return _split(None, tp_size)
    # state-space layers mark what TP ranks have a range of, and do not say along which dim
    return _split(max(0, getattr(weight.param, "partition_dim", 0)), tp_size)


def _split(dim: int | None, tp_size: int) -> Split:
    if tp_size == 1:
        return "whole"
    return "replicated" if dim is None or dim < 0 else ("rows", "columns")[dim]
