"""The kinds of pipeline stage of a run, and their optimizers as the time model takes
them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.dry_run.optimizers import optimizer_of, state_bytes_of
from megatron_muon.lab.dry_run.stages import Stage, built, in_stage
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.lab.progress import progress
from megatron_muon.mcore.routing.param_routing import weights, why_adamw
from megatron_muon.mcore.routing.routes import require_matched
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.planning.describe import Share, require_muons
from megatron_muon.planning.grid import neighbours_of


@dataclass(frozen=True, slots=True)
class PlannedKind:
    """Pipeline stages with equal plans; the first of them stands for all."""

    stages: list[int]  # their numbers
    # world ranks of the first of them, in the first optimizer instance
    members: tuple[int, ...]
    share: Share  # elements of one such stage
    optimizers: list[list[Optimizer]]  # for each run, in the order of their steps
    notes: tuple[str, ...]  # lines about the choice of its buckets in the first run
    buckets: int | None  # the number that is chosen, if any


def makeup_of(stage: Stage) -> tuple[object, ...]:
    """All that a rank's optimizer step of a stage follows from: equal ones have equal
    plans.
    """
    config = stage.run.config
    makeup: list[object] = [
        neighbours_of([rank // config.node_ranks for rank in stage.members])
    ]
    for at, chunk in enumerate(stage.chunks):
        for weight in weights([chunk], stage.sizes):
            reason = why_adamw(weight, config)
            name = re.sub(r"\blayers\.\d+", "layers", weight.name)
            is_shared = bool(getattr(weight.param, "shared_embedding", False))
            shape = tuple(weight.param.shape)
            makeup.append((at, name, shape, weight.param.dtype, reason, is_shared))
    return tuple(makeup)


def planned_kinds(
    runs: Sequence[Run], device: Device, numbers: range
) -> list[PlannedKind]:
    """Pipeline stages by kind, one of each planned.

    Args:
        runs: runs of one model on the same ranks, such as with different layouts. The
            first one says which stages are of one kind; each run is planned.
        device: kind of device of every rank.
        numbers: the stages to look at.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses the flags, as in the run; or a stage has no parameters
            (ValueError).
    """
    own = runs[0]
    kinds: dict[tuple[object, ...], PlannedKind] = {}
    matched: set[str] = set()
    stages = range(own.ranks.pp)
    every = sorted(stages, key=lambda number: number not in numbers)
    for number in progress(every, "pipeline stages"):
        if number not in numbers and matched.issuperset(own.config.patterns):
            break  # other stages are built for the patterns that match there
        with in_stage(number, own):
            stage = built(own)
            matched |= stage.matched
            if number not in numbers:
                continue
            makeup = makeup_of(stage)
            if makeup in kinds:
                kinds[makeup].stages.append(number)
            else:
                others = [built(run) for run in runs[1:]]
                kinds[makeup] = _planned(number, [stage, *others], device)
    require_matched(matched, own.config)
    if len(numbers) == own.ranks.pp:
        require_muons(sum((kind.share for kind in kinds.values()), start=Share()))
    return list(kinds.values())


def _planned(number: int, of_runs: Sequence[Stage], device: Device) -> PlannedKind:
    """A stage as the first of its kind, by each of the runs."""
    optimizers = []
    for stage in of_runs:
        held = state_bytes_of(stage.run)
        optimizers.append([optimizer_of(one, held) for one in stage.optimizers(device)])
    if not optimizers[0]:
        raise ValueError(f"pipeline stage {number} has no parameters")
    own = of_runs[0]
    return PlannedKind(
        [number], own.members, own.share, optimizers, own.notes, own.buckets.number
    )
