"""A run's treatment of every parameter of every pipeline stage, by the code that the
run runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_muon.lab.dry_run.model import Ranks, Run
from megatron_muon.lab.dry_run.optimizers import Planned
from megatron_muon.lab.dry_run.stages import Stage, built, in_stage
from megatron_muon.lab.routes.sentences import (
    optimizer_text,
    pattern_lines,
)
from megatron_muon.mcore.host.process_groups import local_experts
from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.multipliers import of_group
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    is_cut,
    names_of,
    weights,
    why_adamw,
)
from megatron_muon.mcore.routing.routes import require_matched
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.describe import (
    PREFIX,
    Share,
    held_and_sent,
    memory_line,
    share_lines,
)
from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.rules.muon import update_scale
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import row_of

Split = Literal["rows", "columns", "replicated", "whole"]


@dataclass(frozen=True, slots=True)
class Routed:
    """A matrix."""

    name: str  # the parameter's, with the part in brackets where it holds several
    rows: int  # over all TP ranks
    cols: int
    # factor of its orthogonalized update, update_scale; hyperball has radii, not known
    # before a run
    scale: float | None
    home: int  # rank of the stage that orthogonalizes it
    settings: str  # its own, by pattern


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
    settings: str  # its rates and its decay by pattern
    matrices: tuple[Routed, ...] = ()  # Muon's


@dataclass(frozen=True, slots=True)
class RoutedStage:
    """A pipeline stage."""

    stage: int  # its number
    # of the world, in the order of the stage; of the first instance
    ranks: tuple[int, ...]
    lines: tuple[str, ...]  # a sentence about each of its optimizers
    # all parameters; of an expert's there is one for each EP rank
    parameters: tuple[RoutedParameter, ...]


@dataclass(frozen=True, slots=True)
class Routes:
    """A model's routes, over all stages; ``lines`` are what a run prints about the
    model.
    """

    ranks: Ranks
    lines: tuple[str, ...]
    stages: tuple[RoutedStage, ...]
    notes: tuple[str, ...]  # lines about the choice of buckets


def routes(run: Run) -> Routes:
    """Build one rank of each pipeline stage, without memory for parameters, and ask the
    plugin.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin finds something wrong, as they would in the run.
    """
    ranks = run.ranks
    matched: set[str] = set()
    stages: list[RoutedStage] = []
    notes: list[str] = []
    share = Share()
    memory: list[tuple[int, int]] = []
    for number in range(ranks.pp):
        with in_stage(number, run):
            stage = built(run)
            optimizers = stage.optimizers()
            stages.append(_stage(number, stage, optimizers))
            memory.append(held_and_sent([each.plan for each in optimizers]))
            notes += stage.notes
            matched |= stage.matched
            share += stage.share
    require_matched(matched, run.config)
    lines = pattern_lines(Numerics(run.config))
    lines += [f"{PREFIX} {line}" for line in share_lines(share)]
    lines.append(f"{PREFIX} {memory_line(memory)}")
    return Routes(ranks, tuple(lines), tuple(stages), tuple(notes))


def _stage(number: int, stage: Stage, optimizers: Sequence[Planned]) -> RoutedStage:
    matrices: dict[tuple[str, int], tuple[Routed, ...]] = {}  # by parameter and EP rank
    of_experts: set[Any] = set()
    sentences: list[str] = []
    earlier: list[ExchangePlan] = []
    for planned in optimizers:
        matrices |= _matrices(planned, stage.run.config)
        if planned.experts:
            of_experts.update(*(buffer.param_index_map for buffer in planned.buffers))
        buckets = [len(buffer.buckets) for buffer in planned.buffers]
        sentences.append(
            optimizer_text(
                planned.plan,
                experts=planned.experts,
                buckets=buckets,
                earlier=earlier,
                rule=stage.run.config.rule,
            )
        )
        earlier = [*earlier, planned.plan]
    lines: tuple[str, ...] = ()
    if sentences:
        lines = (f"{PREFIX} pipeline stage {number}: {'. '.join(sentences)}",)
    parameters: list[RoutedParameter] = []
    for weight in weights(stage.chunks, stage.sizes):
        ep_size = stage.sizes.ep if weight.param in of_experts else 1
        row = _adamws(weight, stage)
        experts = local_experts(stage.chunks, ep_size)
        for ep_rank in range(ep_size):
            names = names_of(weight, ep_rank, experts)
            lr_mult, wd_mult, settings = of_group(weight, names, stage.run.config)
            name = names[0]
            row = replace(
                row, name=name, lr_mult=lr_mult, wd_mult=wd_mult, settings=settings
            )
            if weight.param in of_experts:
                row = replace(row, ep_rank=ep_rank)
            if row.reason is None:
                row = replace(row, optimizer="muon", matrices=matrices[name, ep_rank])
            parameters.append(row)
    return RoutedStage(number, stage.members, lines, tuple(parameters))


def _adamws(weight: Weight, stage: Stage) -> RoutedParameter:
    """A weight's row, as long as no matrices of it are known."""
    config = stage.run.config
    reason = why_adamw(weight, config)
    return RoutedParameter(
        name=weight.name,
        shape=tuple(weight.param.shape),
        tp=_split(weight, config, reason),
        ep_rank=None,
        optimizer="adamw",
        reason=reason,
        lr_mult=1.0,
        wd_mult=1.0,
        settings="",
    )


def _matrices(
    planned: Planned, config: MuonConfig
) -> dict[tuple[str, int], tuple[Routed, ...]]:
    """Matrices by their parameter's name and EP rank."""
    matrices = iter(planned.plan.matrices)
    return {
        (parameter.name, parameter.ep_rank): tuple(
            Routed(m.name, *m.unit, _scale(m, config), m.home, m.own)
            for m in (next(matrices) for _ in parameter.matrices)
            for _ in range(m.units)
        )
        for parameter in planned.plan.parameters
    }


def _scale(matrix: Matrix, config: MuonConfig) -> float | None:
    own = config.where(matrix.own)
    return update_scale(*matrix.whole, own) if row_of(own.rule).scales else None


def _split(weight: Weight, config: MuonConfig, reason: str | None) -> Split:
    if weight.tp_size == 1:
        return "whole"
    if reason is None:
        dim = matrices_of(weight, replace(config, splits=())).partition_dim
    elif is_cut(weight):
        # state-space layers mark what TP ranks have a range of, and do not say along
        # which dim
        dim = max(0, getattr(weight.param, "partition_dim", 0))
    else:
        dim = None
    return "replicated" if dim is None or dim < 0 else ("rows", "columns")[dim]
