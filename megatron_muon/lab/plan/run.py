"""The plan of a whole run: every kind of pipeline stage, by every algorithm that is
asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.plan.kinds import PlannedKind, planned_kinds
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
from megatron_muon.lab.routes.model_flags import CommandLine, megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.describe import Share
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Pipeline stages that are alike."""

    stages: tuple[int, ...]  # their numbers
    ranks: (
        int  # number of ranks of one; with several optimizer instances, of one instance
    )
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
    layout: Name  # the layout that its flags ask for
    hardware: Hardware  # of every rank
    device: Device  # kind of device
    kinds: tuple[StagePlan, ...]  # its pipeline stages by kind
    training: Training  # forward and backward of a step
    buckets: int | None  # as the flags or the plugin ask; None: Megatron's own
    notes: tuple[str, ...]  # what there is to say about flags and buckets
    assumptions: tuple[str, ...]  # those on the training step, with their sources

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


def plan_run(
    line: CommandLine,
    hardware: Hardware,
    device: Device,
    wanted: Collection[Name] = NAMES,
    words: Sequence[str] = (),
) -> RunPlan:
    """Plan one stage of each kind, and price it, with further flags of the command or
    of the run.

    AdamW's row and that of the run's own layout are always there.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses the flags.
    """
    own = line.settled(words)
    ranks, config, options = own.ranks, own.config, line.options(words)
    layout: Name = own.flags.muon_dp_layout or "contiguous"
    layouts = [layout, *(name for name in OURS if name != layout and name in wanted)]
    runs = [
        own,
        *(line.settled([*words, "--muon-dp-layout", name]) for name in layouts[1:]),
    ]
    if Numerics(config, device).split != "off":  # others have whole matrices
        whole = ["--muon-split-matrices", "off", "--muon-dp-layout", "contiguous"]
        runs.append(line.settled([*words, *whole]))
    numbers = range(ranks.pp)
    if options.stage is not None:
        if options.stage >= ranks.pp:
            raise ValueError(
                f"--stage {options.stage}: the last pipeline stage is {ranks.pp - 1}"
            )
        numbers = range(options.stage, options.stage + 1)
    with megatron_is_quiet():
        kinds = planned_kinds(
            [(run.flags, run.config) for run in runs], ranks, device, numbers
        )
        staged = tuple(
            _stage(kind, layouts, config, hardware, device, wanted) for kind in kinds
        )
    active = sum(kind.share.active * len(kind.stages) for kind in kinds)
    active = active * ranks.pp // len(numbers)  # where --stage leaves some out
    training, assumptions = training_of(own.flags, options.mfu, ranks.world, active)
    return RunPlan(
        ranks=ranks,
        config=config,
        layout=layout,
        hardware=hardware,
        device=device,
        kinds=staged,
        training=training,
        buckets=own.flags.ddp_num_buckets,
        notes=tuple(own.notes),
        assumptions=assumptions,
    )


def _stage(
    kind: PlannedKind,
    layouts: Sequence[Name],
    config: MuonConfig,
    hardware: Hardware,
    device: Device,
    wanted: Collection[Name],
) -> StagePlan:
    """One stage; ``layouts`` are those of its first runs, and its last run has whole
    matrices.
    """
    nodes = nodes_of(kind.members, hardware)
    own = kind.optimizers[0]
    whole = kind.optimizers[-1] if len(kind.optimizers) > len(layouts) else own
    by_layout = dict(zip(layouts, kind.optimizers, strict=False))
    rows = [adamw_row(own, hardware)]
    rows += [
        our_row(name, by_layout[name], nodes, config, hardware, device)
        for name in OURS
        if name in by_layout
    ]
    plans = [one.plan for one in own]
    if "paper" in wanted:
        rows.append(paper_row(whole, nodes, config, hardware, device))
    # without it, all modes are one
    has_tp = any(plan.grid.tp_size > 1 for plan in plans)
    rows += [
        layer_wise_row(mode, whole, config, hardware, device)
        for mode in get_args(TpMode)
        if mode in wanted and (has_tp or mode == "duplicated")
    ]
    dp_sizes = [plan.grid.dp_size for plan in plans]
    return StagePlan(
        stages=tuple(kind.stages),
        ranks=plans[0].size,
        share=kind.share,
        matrices=sum(matrix.units for plan in plans for matrix in plan.matrices),
        reduced=sum(
            (one.gradients + one.parameters) * (dp_size - 1) / dp_size
            for one, dp_size in zip(own, dp_sizes, strict=True)
        ),
        rows=tuple(rows),
    )
