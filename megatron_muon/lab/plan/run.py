"""The plan of a whole run: every kind of pipeline stage, by every algorithm that is asked for."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass

from megatron_muon.config import MuonConfig
from megatron_muon.lab.dry_run.kinds import PlannedKind, buffers_of, optimizer_of, planned_kinds
from megatron_muon.lab.dry_run.model import Ranks, transformer_config
from megatron_muon.lab.dry_run.stages import Planned
from megatron_muon.lab.plan.first_gather import FirstGather, first_gathers
from megatron_muon.lab.plan.homes import Homes, homes_of
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
from megatron_muon.lab.routes.model_flags import Settled, megatron_is_quiet, settled
from megatron_muon.orthogonalize.iteration import Device, split_of
from megatron_muon.planning.describe import Share

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
    given: Namespace, hardware: Hardware, device: Device, wanted: Collection[Name] = NAMES
) -> RunPlan:
    """Plan one stage of each kind, and price it.

    Args:
        given: parsed flags, of ``options.parser``.
        hardware: of every rank.
        device: kind of device, with or without a library's symmetric products.
        wanted: the algorithms; AdamW's row is always there.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the plugin
            refuses the flags.
    """
    layout: Name = given.muon_dp_layout or "contiguous"
    first = [layout, *(name for name in OURS if name != layout and name in wanted)]
    runs = [_in_layout(given, name) for name in first]
    if split_of(runs[0][1].config, device) != "off":  # others' algorithms take whole matrices
        given = Namespace(**{**vars(given), "muon_split_matrices": "off"})
        runs.append(_in_layout(given, "contiguous"))
    ranks = runs[0][1].ranks
    numbers = range(ranks.pp)
    if given.stage is not None:
        if given.stage >= ranks.pp:
            raise ValueError(f"--stage {given.stage}: the last pipeline stage is {ranks.pp - 1}")
        numbers = range(given.stage, given.stage + 1)
    with megatron_is_quiet():
        kinds = planned_kinds([(flags, run.config) for flags, run in runs], ranks, device, numbers)
        config = runs[0][1].config
        overlaps = runs[0][0].overlap_param_gather
        staged = tuple(
            _stage_plan(kind, first, config, hardware, device, wanted, ranks if overlaps else None)
            for kind in kinds
        )
        made, assumptions = _training(runs[0][0], ranks, kinds)
    return RunPlan(
        ranks=ranks,
        config=config,
        layout=layout,
        hardware=hardware,
        device=device,
        kinds=staged,
        training=made,
        buckets=runs[0][0].ddp_num_buckets,
        notes=tuple(runs[0][1].notes),
        assumptions=tuple(assumptions),
    )


def _in_layout(given: Namespace, layout: str) -> tuple[Namespace, Settled]:
    flags = Namespace(**vars(given))
    flags.muon_dp_layout = layout
    return flags, settled(flags)


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
    flags: Namespace, ranks: Ranks, kinds: list[PlannedKind]
) -> tuple[Training, list[str]]:
    """Forward and backward, and what is assumed about them."""
    config = transformer_config(flags, ranks)
    sequence = flags.seq_length or flags.max_position_embeddings or _SEQUENCE
    active = sum(kind.share.active * len(kind.stages) for kind in kinds)
    planned = sum(len(kind.stages) for kind in kinds)
    active = active * ranks.pp // planned  # where --stage leaves some out
    each = flops_per_token(
        active,
        layers=config.num_layers,
        heads=config.num_attention_heads,
        head_size=config.kv_channels,
        sequence=sequence,
    )
    tokens = training.TOKENS
    said = f"tokens per step {tokens:,} ({training.TOKENS_SOURCE}); --global-batch-size"
    if flags.global_batch_size is not None:
        tokens = flags.global_batch_size * sequence
        said = f"tokens per step {tokens:,} (--global-batch-size x sequences of {sequence:,})"
    mfu, source = training.MFU, training.MFU_SOURCE
    if flags.mfu is not None:
        mfu, source = flags.mfu, "--mfu"
    return Training(tokens, each, mfu, ranks.world), [
        said,
        f"mfu of forward and backward {mfu:g} ({source}); --mfu",
        f"flops per token {each:.4g}, {active:,} active parameters ({training.FLOPS_SOURCE})",
    ]
