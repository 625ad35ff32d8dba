"""All that tests of a GPU take of the package's dry run, which builds models without
memory.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from megatron_muon.lab.dry_run import world as world
from megatron_muon.lab.dry_run.chunks import build_chunks as build_chunks
from megatron_muon.lab.dry_run.model import Ranks as Ranks
from megatron_muon.lab.dry_run.model import ranks_of as ranks_of
from megatron_muon.lab.dry_run.model import transformer_config as transformer_config
from megatron_muon.lab.dry_run.stages import Planned, as_rank
from megatron_muon.lab.dry_run.stages import built as built
from megatron_muon.lab.dry_run.stages import planned_optimizers as planned_optimizers
from megatron_muon.lab.plan.kinds import makeup_of
from megatron_muon.lab.plan.kinds import optimizer_of as optimizer_of
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.settings.config import MuonConfig


def planned_on(
    devices: Sequence[Device],
    flags: Namespace,
    config: MuonConfig,
    ranks: Ranks,
    number: int,
) -> list[list[Planned]]:
    """DistributedOptimizers of a pipeline stage in the order of their steps, for each
    device.
    """
    with as_rank(world.first_ranks(ranks)[number], flags, ranks):
        chunks = built(flags, config, ranks)
        return [
            planned_optimizers(flags, config, ranks, chunks, device)
            for device in devices
        ]


def stage_makeup(
    flags: Namespace, config: MuonConfig, ranks: Ranks, number: int
) -> tuple[object, ...]:
    """``makeup_of`` a pipeline stage."""
    with as_rank(world.first_ranks(ranks)[number], flags, ranks):
        return makeup_of(flags, config, ranks, built(flags, config, ranks))
