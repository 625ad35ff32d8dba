"""The start of a run: at most six lines on rank 0, about what all ranks have built.

``planning.describe`` has the words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_muon.mcore.host.process_groups import Stage
from megatron_muon.mcore.routing.routes import (
    Route,
    matched_patterns,
    require_matched,
)
from megatron_muon.mcore.routing.survey import share_of
from megatron_muon.mcore.seams.rows import described_version
from megatron_muon.orthogonalize.matmul import describe_products
from megatron_muon.orthogonalize.newton_schulz import takes_batches
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning import describe
from megatron_muon.planning.describe import Share
from megatron_muon.rules.fused import describe_elementwise
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import together

unusual: list[str] = []  # what is said in the block of the next optimizer, too


def start_lines(
    dist_opts: Sequence[Any],
    model_chunks: Sequence[Any],
    routes: Sequence[Route],
    numerics: Numerics,
    stage: Stage,
) -> list[str]:
    """Check the patterns and count the elements of the whole model. Every rank of the
    world calls it.

    Returns:
        The block for rank 0, the same on every rank.

    Raises:
        ValueError: a pattern matches no parameter of any stage, or Muon has none of the
            model.
    """
    config = numerics.config
    here = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    ranks_here = int(here) if here.isdecimal() else config.node_ranks

    def own() -> list[Any]:  # it may fail on some stages only
        matched = sorted(matched_patterns(model_chunks, stage.sizes, config))
        if not stage.speaks:
            return [matched, {}, None]
        plans = [part.muon.plan for part in dist_opts]
        share = share_of(routes, config)
        share.remarks.extend(describe.node_lines(plans, config, ranks_here))
        return [matched, asdict(share), describe.held_and_sent(plans)]

    ranks = collectives.all_gather_json(together(own, None, stage.device), None)
    matched, shares, memory = zip(*ranks, strict=True)
    require_matched(set().union(*matched), config)
    model = sum((Share(**share) for share in shares), start=Share())
    share_line, *remarks = describe.share_lines(model)
    said = [*unusual, *config.by_pattern, *remarks]
    unusual.clear()
    block = [
        describe.active_line(described_version(), torch.__version__, config),
        describe.computing_line(
            numerics,
            describe_products(numerics),
            describe_elementwise(stage.device, numerics),
            in_batches=takes_batches(stage.device),
        ),
        share_line,
        *([f"unusual: {' | '.join(said)}"] if said else []),
        describe.memory_line(filter(None, memory)),
        "matrices, homes and messages: `megatron-muon routes` with the run's flags",
    ]
    return [f"{describe.PREFIX} {line}" for line in block]
