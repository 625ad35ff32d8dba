"""The start of a run: one block of lines on rank 0, about what all ranks have built.

Without warnings and changed choices it has at most 12 lines; ``planning.describe`` has
the words.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_muon.mcore.host.process_groups import Stage, has_experts
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.mcore.routing.survey import (
    matched_patterns,
    require_matched,
    share_of,
)
from megatron_muon.mcore.seams.rows import described_version
from megatron_muon.orthogonalize.matmul import describe_products
from megatron_muon.orthogonalize.newton_schulz import takes_batches
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning import describe
from megatron_muon.planning.describe import Share
from megatron_muon.rules.fused import describe_elementwise
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import together

_of_flags: list[str] = []


def say_at_start(lines: Sequence[str]) -> None:
    """Print lines in the block of the next optimizer, each after the plugin's name."""
    _of_flags.extend(lines)


def forget() -> None:
    """Forget lines that no optimizer's block has had."""
    _of_flags.clear()


def start_lines(
    dist_opts: Sequence[Any],
    model_chunks: Sequence[Any],
    routes: Sequence[Route],
    numerics: Numerics,
    stage: Stage,
    *,
    changes: Sequence[str],
    names: describe.Names,
) -> list[str]:
    """Check the patterns and count the elements of the whole model. Every rank of the
    world calls it.

    Args:
        changes: lines about choices that are not as they were asked for.
        names: of this rank's weights, by the sentence about them.

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
        share, text, warnings = Share(names=names), "", []
        if stage.speaks:
            share += share_of(routes, config)
            text = ". ".join(_sentences(dist_opts))
            plans = [part.muon.plan for part in dist_opts]
            warnings = describe.node_lines(plans, config, ranks_here)
        return [matched, asdict(share), stage.pipeline_rank, text, warnings]

    ranks = collectives.all_gather_json(together(own, None, stage.device), None)
    patterns: set[str] = set()
    model = Share()
    of_stages: dict[int, str] = {}
    all_warnings: list[str] = []
    for matched, share, number, text, warnings in ranks:
        patterns.update(matched)
        model += Share(**share)
        if text:
            of_stages[number] = text
        all_warnings += warnings
    require_matched(patterns, config)
    core = described_version()
    machines = {rank // ranks_here for rank in collectives.world_ranks(stage.group)}
    block = [
        describe.active_line(core, torch.__version__, config),
        *(f"{describe.PREFIX} {line}" for line in _of_flags),
        *changes,
        *describe.pattern_lines(numerics),
        *describe.share_lines(model),
        describe.computing_line(
            numerics,
            describe_products(numerics),
            describe_elementwise(stage.device, numerics),
            in_batches=takes_batches(stage.device),
        ),
        *describe.stage_lines(of_stages),
        *(describe.link_lines(config) if len(machines) > 1 else ()),
        *dict.fromkeys(all_warnings),
    ]
    _of_flags.clear()
    return block


def _sentences(dist_opts: Sequence[Any]) -> list[str]:
    """About each optimizer of this rank's stage."""
    sentences: list[str] = []
    for at, part in enumerate(dist_opts):
        muon = part.muon
        sentences.append(
            describe.optimizer_text(
                muon.plan,
                experts=has_experts(part),
                buckets=[len(buffer.buckets) for buffer in part.buffers],
                earlier=[before.muon.plan for before in dist_opts[:at]],
                rule=muon.config.rule,
            )
        )
        sentences += muon.remarks()
    return sentences
