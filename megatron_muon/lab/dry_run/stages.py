"""A pipeline stage of a run, built and planned by the code that the run executes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.optimizer import OptimizerConfig

from megatron_muon.lab.dry_run import world
from megatron_muon.lab.dry_run.chunks import build_chunks, transformer_config
from megatron_muon.lab.dry_run.model import Run
from megatron_muon.lab.dry_run.optimizers import Planned, planned_optimizers
from megatron_muon.lab.dry_run.script import ScriptArguments
from megatron_muon.mcore.host.loop import Host, host, set_host
from megatron_muon.mcore.host.process_groups import Sizes
from megatron_muon.mcore.routing.routes import Route, matched_patterns, routes_of
from megatron_muon.mcore.routing.survey import share_of
from megatron_muon.mcore.wiring.buffers.bucket_layout import build
from megatron_muon.mcore.wiring.validate import (
    REFUSED,
    raise_all,
    refuse_unsupported,
    unsliced,
)
from megatron_muon.orthogonalize.numerics import Device
from megatron_muon.planning.buckets import Buckets
from megatron_muon.planning.describe import Share
from megatron_muon.runtime.patches import Patches
from megatron_muon.settings.config import MuonConfig


class Chooser(Host):
    """A training loop that keeps what the plugin chooses of grad buffers."""

    chosen: Buckets = Buckets()

    def take_buckets(self, chosen: Buckets) -> None:
        self.chosen = chosen


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage of a run on its first rank; it is used within ``in_stage``."""

    run: Run
    chunks: list[Any]  # Megatron's, in their DDP; their parameters have no memory
    sizes: Sizes  # numbers of ranks that hold slices of a weight
    routes: list[Route]  # of all parameters that train
    buckets: Buckets  # of the grad buffers, where the run leaves them to the plugin

    @property
    def members(self) -> tuple[int, ...]:
        """World ranks of the stage, of the first optimizer instance."""
        return tuple(world.stage_ranks(self.run.ranks))

    @property
    def matched(self) -> set[str]:
        """The patterns of the settings that match a parameter of this stage."""
        return matched_patterns(self.chunks, self.sizes, self.run.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the choice of its buckets."""
        return (self.buckets.reason,) if self.buckets.reason else ()

    @property
    def share(self) -> Share:
        """Elements of the stage, by optimizer."""
        return share_of(self.routes, self.run.config)

    def optimizers(self, device: Device = "cuda") -> list[Planned]:
        """Its DistributedOptimizers, in the order of their steps."""
        return planned_optimizers(self.run, self.chunks, self.routes, device)


def in_stage(number: int, run: Run) -> AbstractContextManager[None]:
    """A context in which this process is the first rank of a pipeline stage
    (``world.as_rank``).
    """
    options = run.flags.embeddings if isinstance(run.flags, ScriptArguments) else {}
    return world.as_rank(world.first_ranks(run.ranks)[number], run.ranks, **options)


@contextmanager
def _choosing_buckets(config: MuonConfig, chooser: Chooser) -> Iterator[None]:
    """A context in which buffers are laid out as in a run with these settings; nothing
    may be installed.
    """
    patches = Patches()
    before = host()
    if chooser.leaves_buckets:
        name = "DistributedDataParallel.__init__"
        patches.wrap("megatron.core.distributed", name, partial(build, config))
    set_host(chooser)
    try:
        yield
    finally:
        set_host(before)
        patches.undo()


def built(run: Run) -> Stage:
    """The stage that this process is in, without memory for parameters.

    Raises:
        ValueError, NotImplementedError, AssertionError, RuntimeError: Megatron or the
            plugin refuses it, as in the run.
    """
    flags, config, ranks = run.flags, run.config, run.ranks
    chooser = Chooser(leaves_buckets=run.leaves_buckets)
    with world.without_memory(), _choosing_buckets(config, chooser):
        if isinstance(flags, ScriptArguments):
            chunks = flags.chunks()
        else:
            chunks = build_chunks(flags, transformer_config(flags, ranks))
    of_optimizer = OptimizerConfig(
        optimizer="adam",
        bf16=flags.bf16,
        fp16=flags.fp16,
        use_distributed_optimizer=True,
    )
    # given to the class, some of them would ask for a GPU
    for name in (*REFUSED, "overlap_param_gather_with_optimizer_step"):
        setattr(of_optimizer, name, getattr(flags, name, False))
    refuse_unsupported(of_optimizer, chunks)
    raise_all(unsliced(config, max(ranks.tp, ranks.expert_tp)))
    sizes = Sizes(ranks.tp, ranks.expert_tp, ranks.ep)
    routes = routes_of(chunks, sizes, config)
    return Stage(run, chunks, sizes, routes, chooser.chosen)
