"""The layout of grad buffers that a run takes by itself: by both speeds, or as it was
saved.

Only where ``--muon-dp-layout`` is not given. A run that starts without a checkpoint and
with a stated link takes the layout with the shorter step, from plans of its first
pipeline stage. One that goes on from a checkpoint keeps its layout: formats in buckets
load into no others.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from megatron_muon.mcore.load_check import digest
from megatron_muon.megatron_lm.bucketing import (
    REFERENCE_DP_SIZE,
    aligns_shards,
    buffers,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.buckets.count import (
    Buffer,
    choose,
    in_buckets,
    stock_bucket_size,
)
from megatron_muon.planning.buckets.order import Holders, orders, parameters_in
from megatron_muon.planning.grid import RankGrid, neighbours_of
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.settings.config import MuonConfig

# With it the time model has the other layout ahead by more than 5 % in none of 114
# runs, 340M and Llama-3-8B on 2 to 64 ranks at 3 to 450 GB/s.
_LEAST_GAIN = Fraction(1, 32)
_FIXED = (
    "ddp_num_buckets",
    "ddp_bucket_size",
    "overlap_param_gather_with_optimizer_step",
)
_HYBRID = ("hybrid_override_pattern", "hybrid_layer_pattern")


def own_layout(
    args: Namespace, config: MuonConfig, device: Device, folder: Path | None
) -> tuple[str, list[str]]:
    """The layout, and lines to print; ``folder`` is the checkpoint that the run goes on
    from.
    """
    if folder is not None:
        saved = saved_layout(folder)
        return saved, [f"--muon-dp-layout {saved}, as {folder} has it"] * (
            saved == "bucketed"
        )
    free = args.overlap_grad_reduce and not any(
        getattr(args, x, None) for x in (*_FIXED, *_HYBRID)
    )
    if not free or not config.homes_by_link or not config.checkpoint_digest:
        return "contiguous", []
    chosen = choose(buffers(args, REFERENCE_DP_SIZE))
    if chosen is None:
        return "contiguous", []
    weights = [weight for one in buffers(args, 1, norms=True) for weight in one.weights]
    size = sum(each.numel for each in weights) // chosen.number
    own = Numerics(config, device)
    contiguous = _ends(args, own, size, in_order=aligns_shards(args))
    own = Numerics(replace(config, align_shards=False), device)
    bucketed = _ends(args, own, None, in_order=False)
    if bucketed >= contiguous * (1 - _LEAST_GAIN):
        return "contiguous", []
    return "bucketed", [
        "--muon-dp-layout bucketed: by the stated speeds a step takes "
        f"{bucketed / contiguous:.0%} of the time of contiguous. Runs that go on from "
        "its checkpoints keep it; the flag sets it"
    ]


def note(layout: str) -> None:
    """Have this run's checkpoints name its layout where it is not the default."""
    digest.beside.pop("layout", None)
    if layout == "bucketed":
        digest.beside["layout"] = layout


def saved_layout(folder: Path) -> str:
    """The layout that a checkpoint's digest names; that of earlier versions where it
    names none.
    """
    try:
        content = digest.read(folder) or {}
    except (digest.DigestError, OSError):  # the load says so
        content = {}
    return "bucketed" if content.get("layout") == "bucketed" else "contiguous"


def _ends(
    args: Namespace, numerics: Numerics, size: int | None, *, in_order: bool
) -> int:
    """The time of a step with buckets of a size; None: of Megatron's own."""
    ranks = args.world_size // args.pipeline_model_parallel_size
    stock = stock_bucket_size(ranks // args.tensor_model_parallel_size)
    plans: list[ExchangePlan] = []
    located = [
        _located(buffer, args, numerics, size or stock, in_order=in_order)
        for buffer in buffers(args, 1, norms=True)
    ]
    work = [flops_of(parameters, numerics) for parameters, _ in located]
    for at, (parameters, grid) in enumerate(located):
        plans.append(make_plan(parameters, grid, numerics, plans, sum(work[at + 1 :])))
    return plans[-1].ends


def _located(
    buffer: Buffer, args: Namespace, numerics: Numerics, size: int, *, in_order: bool
) -> tuple[Sequence[Parameter], RankGrid]:
    """The parameters of a buffer on all EP ranks, in their places, and the ranks."""
    ranks, tp = args.world_size // args.pipeline_model_parallel_size, buffer.tp_size
    names = (weight.muon.name for weight in buffer.weights if weight.muon is not None)
    ep = args.expert_model_parallel_size if ".experts." in next(names, "") else 1
    dp = ranks // (tp * ep)
    buckets = list(in_buckets(replace(buffer, dp_size=dp), size))
    own = [bucket.own() for bucket in buckets]
    order = orders(buckets, Holders(dp, tp), numerics) if in_order else own
    placed = parameters_in(buckets, order)
    neighbours = neighbours_of(
        [rank // numerics.config.node_ranks for rank in range(ranks)]
    )
    grid = tuple(
        tuple(tuple((d * ep + e) * tp + t for d in range(dp)) for t in range(tp))
        for e in range(ep)
    )
    every: list[Parameter] = []
    for ep_rank in range(ep):
        every += [replace(one, ep_rank=ep_rank) for one in placed]
    return every, RankGrid(grid, neighbours)
