"""What tests of a GPU use of the package's dry run, which builds models without memory."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.lab.dry_run import world as world
from megatron_muon.lab.dry_run.chunks import build_chunks as build_chunks
from megatron_muon.lab.dry_run.chunks import transformer_config as transformer_config
from megatron_muon.lab.dry_run.model import Ranks as Ranks
from megatron_muon.lab.dry_run.model import Run as Run
from megatron_muon.lab.dry_run.model import ranks_of as ranks_of
from megatron_muon.lab.dry_run.optimizers import Planned
from megatron_muon.lab.dry_run.optimizers import optimizer_of as optimizer_of
from megatron_muon.lab.dry_run.stages import built, in_stage
from megatron_muon.lab.plan.kinds import makeup_of
from megatron_muon.orthogonalize.numerics import Device


def planned_on(devices: Sequence[Device], run: Run, number: int) -> list[list[Planned]]:
    """DistributedOptimizers of a pipeline stage in the order of their steps, for each
    device.
    """
    with in_stage(number, run):
        stage = built(run)
        return [stage.optimizers(device) for device in devices]


def stage_makeup(run: Run, number: int) -> tuple[object, ...]:
    """``makeup_of`` a pipeline stage."""
    with in_stage(number, run):
        return makeup_of(built(run))
