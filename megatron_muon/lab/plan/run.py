"""The plan of a whole run: every kind of pipeline stage, by each algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from megatron_muon.lab.dry_run.model import Ranks, Run
from megatron_muon.lab.plan.kinds import PlannedKind, planned_kinds
from megatron_muon.lab.plan.request import Request
from megatron_muon.lab.plan.rows import (
    NAMES,
    OURS,
    Name,
    PlannedStep,
    adamw_row,
    layer_wise_row,
    our_row,
    paper_row,
)
from megatron_muon.lab.plan.training import Training, training_of
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.streams import nodes_of
from megatron_muon.lab.pricing.upstream import TpMode
from megatron_muon.lab.progress import progress
from megatron_muon.lab.routes.model_flags import megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.describe import Share, own_rule_text
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import own_rule


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Pipeline stages of one kind."""

    stages: tuple[int, ...]  # their numbers
    # number of ranks of one; with several optimizer instances, of one instance
    ranks: int
    share: Share  # elements of one
    matrices: int  # number of matrices of one
    reduced: float  # bytes that a rank sends for gradients and parameters
    rows: tuple[PlannedStep, ...]  # a row for each algorithm

    def row(self, name: Name) -> PlannedStep:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run."""

    ranks: Ranks  # how its ranks are divided
    config: MuonConfig  # Muon's settings
    layout: Name  # the layout of its grad buffers
    hardware: Hardware  # of every rank
    device: Device  # kind of device
    kinds: tuple[StagePlan, ...]  # its pipeline stages by kind
    training: Training  # forward and backward of a step
    buckets: int | None  # that flags or the plugin choose; None: Megatron's own
    notes: tuple[str, ...]  # lines to print about flags and buckets
    assumptions: tuple[str, ...]  # about the training step, with their sources

    @property
    def names(self) -> list[Name]:
        """The algorithms that were planned."""
        return [row.name for row in self.kinds[0].rows]

    @property
    def slowest(self) -> StagePlan:
        """The stage with the longest step."""
        return max(self.kinds, key=lambda kind: kind.row(self.layout).seconds)

    def seconds(self, name: Name) -> float:
        """The time of an algorithm's step in the slowest stage."""
        return max(kind.row(name).seconds for kind in self.kinds)

    @property
    def step(self) -> float:
        """The time of a step of Muon in the run's layout, in the slowest stage."""
        return self.seconds(self.layout)

    def peak(self, name: Name) -> int:
        """Most bytes of a rank in an algorithm's step, of the fullest stage."""
        rows = (kind.row(name) for kind in self.kinds)
        return max(sum(row.rest.values()) + (row.peak or 0) for row in rows)

    def share(self, name: Name) -> float:
        """The share of an algorithm's step in the training step."""
        return self.seconds(name) / (
            self.seconds(name) + self.training.seconds(self.hardware)
        )

    def slower(self, name: Name) -> float:
        """By how much a training step takes longer than with AdamW."""
        whole = self.training.seconds(self.hardware) + self.seconds("adamw")
        return (self.seconds(name) - self.seconds("adamw")) / whole


def plan_run(request: Request, wanted: Collection[Name] = NAMES) -> RunPlan:
    """Plan one stage of each kind, and price it by the algorithms that are ``wanted``.

    AdamW's row and that of the run's layout are always there.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses the flags.
    """
    run = request.run
    layouts: dict[Name, Run] = {run.layout: run}
    for name in OURS:
        if name in wanted and name != run.layout:
            layouts[name] = request.also("--muon-dp-layout", name).run
    runs = list(layouts.values())
    if (
        Numerics(run.config, request.device).split != "off"
    ):  # others' matrices are whole
        whole = ("--muon-split-matrices", "off", "--muon-dp-layout", "contiguous")
        runs.append(request.also(*whole).run)
    numbers = _stages(request)
    with megatron_is_quiet():
        kinds = planned_kinds(runs, request.device, numbers)
        staged = tuple(
            _stage(kind, list(layouts), request, wanted)
            for kind in progress(kinds, "kinds of stage to price")
        )
    active = sum(kind.share.active * len(kind.stages) for kind in kinds)
    active = active * run.ranks.pp // len(numbers)  # as if all stages were like these
    training, assumptions = training_of(run, request.mfu, active)
    buckets = run.buckets
    if kinds[0].buckets is not None:
        # Megatron-LM divides the elements of all chunks by it
        buckets = kinds[0].buckets * (run.ranks.chunks or 1)
    return RunPlan(
        ranks=run.ranks,
        config=run.config,
        layout=run.layout,
        hardware=request.hardware,
        device=request.device,
        kinds=staged,
        training=training,
        buckets=buckets,
        notes=(*run.notes, *kinds[0].notes, *_own_rule_notes(run.config, kinds)),
        assumptions=assumptions,
    )


def _own_rule_notes(config: MuonConfig, kinds: Sequence[PlannedKind]) -> list[str]:
    """A line about a rule of one's own, whose cost a plan cannot know."""
    own = own_rule(config.rule)
    if own is None:
        return []
    at_homes: Counter[tuple[int, int]] = Counter()
    for stage, kind in enumerate(kinds):
        for one in kind.optimizers[0]:
            for matrix in one.plan.matrices:
                at_homes[stage, matrix.home] += matrix.units
    return [
        f"{own_rule_text(config.rule, own)}. A rank has at most "
        f"{max(at_homes.values(), default=0)} matrices a step. Time and memory of the "
        "rule are not known: Newton-Schulz's are planned in their place"
    ]


def _stages(request: Request) -> range:
    """Numbers of the pipeline stages to plan."""
    pp_size = request.run.ranks.pp
    if request.stage is None:
        return range(pp_size)
    if request.stage >= pp_size:
        raise ValueError(
            f"--stage {request.stage}: the last pipeline stage is {pp_size - 1}"
        )
    return range(request.stage, request.stage + 1)


def _stage(
    kind: PlannedKind,
    layouts: Sequence[Name],
    request: Request,
    wanted: Collection[Name],
) -> StagePlan:
    """One stage; ``layouts`` are those of its first runs, and its last run has whole
    matrices.
    """
    nodes = nodes_of(kind.members, request.hardware)
    own = kind.optimizers[0]
    whole = kind.optimizers[-1] if len(kind.optimizers) > len(layouts) else own
    by_layout = dict(zip(layouts, kind.optimizers, strict=False))
    rows = [adamw_row(own, request)]
    for name in OURS:
        if name in by_layout:
            rows.append(our_row(name, by_layout[name], nodes, request))
    if "paper" in wanted:
        rows.append(paper_row(whole, nodes, request))
    # without TP all modes are one
    has_tp = any(one.plan.grid.tp_size > 1 for one in own)
    for mode in get_args(TpMode):
        if mode in wanted and (has_tp or mode == "duplicated"):
            rows.append(layer_wise_row(mode, whole, request))
    matrices = 0
    reduced = 0.0
    for one in own:
        matrices += sum(matrix.units for matrix in one.plan.matrices)
        dp_size = one.plan.grid.dp_size
        reduced += (one.gradients + one.parameters) * (dp_size - 1) / dp_size
    return StagePlan(
        stages=tuple(kind.stages),
        ranks=own[0].plan.size,
        share=kind.share,
        matrices=matrices,
        reduced=reduced,
        rows=tuple(rows),
    )
