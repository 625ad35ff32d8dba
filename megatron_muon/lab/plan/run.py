"""The plan of a whole run: every kind of pipeline stage, by every algorithm that is asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import Ranks
from megatron_muon.lab.dry_run.stages import Planned
from megatron_muon.lab.plan.first_gather import FirstGather, first_gathers
from megatron_muon.lab.plan.homes import Homes, homes_of
from megatron_muon.lab.plan.kinds import PlannedKind, buffers_of, optimizer_of, planned_kinds
from megatron_muon.lab.plan.rows import (
    NAMES,
    OURS,
    Name,
    PlannedStage,
    PlannedStep,
    adamw_row,
    layer_wise_row,
    our_row,
    paper_row,
)
from megatron_muon.lab.pricing import training
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.streams import nodes_of
from megatron_muon.lab.pricing.training import Training, flops_per_token
from megatron_muon.lab.routes.model_flags import CommandLine, megatron_is_quiet
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.describe import Share
from megatron_muon.settings.config import MuonConfig

_SEQUENCE = 4096


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Pipeline stages that are alike.

    Attributes:
        stages: their numbers.
        ranks: number of ranks of one; with several optimizer instances, of one instance.
        share: elements of one.
        matrices: number of matrices of one.
        reduced: bytes that a rank sends for gradients and parameters.
        homes: those of the layout that the run has.
        first_gathers: with ``overlap_param_gather``, what a forward pass waits for first.
        gathers_early, late_with: whether gathers start within the step, see ``PlannedKind``.
        rows: a row for each algorithm.
    """

    stages: tuple[int, ...]
    ranks: int
    share: Share
    matrices: int
    reduced: float
    homes: Homes
    first_gathers: tuple[FirstGather, ...]
    gathers_early: bool
    late_with: str | None
    rows: tuple[PlannedStep, ...]

    def row(self, name: Name) -> PlannedStep:
        return next(row for row in self.rows if row.name == name)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run.

    Attributes:
        ranks: how its ranks are divided.
        config: Muon's settings.
        layout: the layout that its flags ask for.
        hardware: of every rank.
        device: kind of device.
        kinds: its pipeline stages by kind.
        training: forward and backward of a step.
        buckets: number of buckets that the flags or the plugin ask for; None: Megatron's own.
        notes: what there is to say about flags and buckets.
        assumptions: those on the training step, with their sources.
    """

    ranks: Ranks
    config: MuonConfig
    layout: Name
    hardware: Hardware
    device: Device
    kinds: tuple[StagePlan, ...]
    training: Training
    buckets: int | None
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def names(self) -> list[Name]:
        """The algorithms that were planned."""
        return [row.name for row in self.kinds[0].rows]

    def seconds(self, name: Name) -> float:
        """The time of an algorithm's step in the slowest stage."""
        return max(kind.row(name).seconds for kind in self.kinds)

    def share(self, name: Name) -> float:
        """The share of an algorithm's step in the training step."""
        return self.seconds(name) / (self.seconds(name) + self.training.seconds(self.hardware))

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
    """Plan one stage of each kind, and price it.

    Args:
        line: the run.
        hardware: of every rank.
        device: kind of device, with or without a library's symmetric products.
        wanted: the algorithms; AdamW's row and that of the run's own layout are always there.
        words: further flags, of the command or of the run.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the plugin
            refuses the flags.
    """
    own = line.settled(words)
    ranks, config, options = own.ranks, own.config, line.options(line.own(words))
    layout: Name = own.flags.muon_dp_layout or "contiguous"
    layouts = [layout, *(name for name in OURS if name != layout and name in wanted)]
    runs = [own, *(line.settled([*words, "--muon-dp-layout", name]) for name in layouts[1:])]
    if Numerics(config, device).split != "off":  # others' algorithms take whole matrices
        whole = ["--muon-split-matrices", "off", "--muon-dp-layout", "contiguous"]
        runs.append(line.settled([*words, *whole]))
    numbers = range(ranks.pp)
    if options.stage is not None:
        if options.stage >= ranks.pp:
            raise ValueError(f"--stage {options.stage}: the last pipeline stage is {ranks.pp - 1}")
        numbers = range(options.stage, options.stage + 1)
    with megatron_is_quiet():
        kinds = planned_kinds([(run.flags, run.config) for run in runs], ranks, device, numbers)
        gathers = ranks if own.flags.overlap_param_gather else None
        staged = tuple(
            _stage_plan(kind, layouts, config, hardware, device, {layout, *wanted}, gathers)
            for kind in kinds
        )
        made, assumptions = _training(own.flags, options.mfu, ranks, kinds)
    return RunPlan(
        ranks=ranks,
        config=config,
        layout=layout,
        hardware=hardware,
        device=device,
        kinds=staged,
        training=made,
        buckets=own.flags.ddp_num_buckets,
        notes=tuple(own.notes),
        assumptions=tuple(assumptions),
    )


def _stage_plan(
    kind: PlannedKind,
    layouts: list[Name],
    config: MuonConfig,
    hardware: Hardware,
    device: Device,
    wanted: Collection[Name],
    gathers: Ranks | None,
) -> StagePlan:
    """One stage.

    Args:
        kind: the stage, planned in each of ``layouts``.
        layouts: that of the run first.
        config, hardware, device, wanted: as given to ``plan_run``.
        gathers: how the ranks are divided that gather parameters beside a forward pass.
    """
    nodes = tuple(nodes_of(kind.members, hardware))
    every = [_stage(planned, nodes, kind.stages[0]) for planned in kind.planned]
    stages = dict(zip(layouts, every, strict=False))
    own = stages[layouts[0]]
    others = every[-1] if len(every) > len(layouts) else own
    rows = [adamw_row(own, hardware)]
    rows += [
        our_row(name, stages[name], config, hardware, device)
        for name in OURS
        if name in wanted and name in stages
    ]
    if "paper" in wanted:
        contiguous = others if others is not own else stages.get("contiguous", own)
        rows.append(paper_row(contiguous, config, hardware, device))
    if "duplicated" in wanted:
        rows.append(layer_wise_row("duplicated", others, config, hardware))
    if "distributed" in wanted and any(plan.grid.tp_size > 1 for plan in own.plans):
        rows.append(layer_wise_row("distributed", others, config, hardware))
    return StagePlan(
        stages=tuple(kind.stages),
        ranks=own.plans[0].size,
        share=kind.share,
        matrices=sum(matrix.units for plan in own.plans for matrix in plan.matrices),
        reduced=own.reduced(),
        homes=homes_of(own.plans),
        first_gathers=tuple(
            gather
            for row in rows
            if row.name == layouts[0] and gathers is not None
            for gather in first_gathers(kind.planned[0], row, gathers, hardware)
        ),
        gathers_early=kind.gathers_early,
        late_with=kind.late_with,
        rows=tuple(rows),
    )


def _stage(planned: list[Planned], nodes: tuple[int, ...], number: int) -> PlannedStage:
    if not planned:
        raise ValueError(f"pipeline stage {number} has no parameters")
    optimizers = tuple(optimizer_of(one) for one in planned)
    return PlannedStage(optimizers, tuple(buffers_of(one) for one in planned), nodes)


def _training(
    flags: Namespace, mfu: float | None, ranks: Ranks, kinds: list[PlannedKind]
) -> tuple[Training, list[str]]:
    """Forward and backward, and what is assumed about them."""
    sequence = flags.seq_length or flags.max_position_embeddings or _SEQUENCE
    active = sum(kind.share.active * len(kind.stages) for kind in kinds)
    planned = sum(len(kind.stages) for kind in kinds)
    active = active * ranks.pp // planned  # where --stage leaves some out
    each = flops_per_token(
        active,
        layers=flags.num_layers,
        heads=flags.num_attention_heads,
        head_size=flags.kv_channels or flags.hidden_size // flags.num_attention_heads,
        sequence=sequence,
    )
    tokens = training.TOKENS
    said = f"tokens per step {tokens:,} ({training.TOKENS_SOURCE}); --global-batch-size"
    if flags.global_batch_size is not None:
        tokens = flags.global_batch_size * sequence
        said = f"tokens per step {tokens:,} (--global-batch-size x sequences of {sequence:,})"
    source = training.MFU_SOURCE if mfu is None else "--mfu"
    mfu = training.MFU if mfu is None else mfu
    return Training(tokens, each, mfu, ranks.world), [
        said,
        f"mfu of forward and backward {mfu:g} ({source}); --mfu",
        f"flops per token {each:.4g}, {active:,} active parameters ({training.FLOPS_SOURCE})",
    ]
