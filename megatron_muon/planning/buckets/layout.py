"""The layout of a stage's grad buffers: contiguous, in a chosen number of buckets, or
bucketed, in Megatron's own.

Where gradient reduction does not overlap, and on later pipeline stages, a buffer is one
bucket, so shards are contiguous. With the overlap, Megatron's buckets have about 40 M
elements, whose shards cut nearly every parameter of a large model. The contiguous
layout takes the fewest buckets that keep the overlap (``count``). A new run takes the
layout whose step is shorter by the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import (
    Buffer,
    choose,
    in_buckets,
    stock_bucket_size,
)
from megatron_muon.planning.buckets.order import Holders, orders, parameters_in
from megatron_muon.planning.grid import RankGrid, neighbours_of
from megatron_muon.planning.layout import Parameter
from megatron_muon.planning.plan import flops_of
from megatron_muon.planning.stage import Choice, Stage

# The number of buckets must not depend on the number of ranks. A run may start from an
# AdamW checkpoint in dp_reshardable, which loads at another DP size, but not into other
# buckets. A small size is taken since the exchange costs most with few ranks.
REFERENCE_DP_SIZE = 8
# With it the time model has the other layout ahead by more than 5 % in none of 114
# runs, 340M and Llama-3-8B on 2 to 64 ranks at 3 to 450 GB/s.
_LEAST_GAIN = Fraction(1, 32)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of the grad buffers of the first pipeline stage."""

    name: Literal["contiguous", "bucketed"]
    # number of buckets of the first model chunk; None: as many as Megatron makes
    number: int | None
    reason: str  # a line to print


def choose_layout(
    buffers: Sequence[Buffer], numerics: Numerics, *, may_be_bucketed: bool
) -> Layout:
    """The layout of a stage whose reduction of gradients overlaps.

    Args:
        buffers: those of the first model chunk.
        numerics: of the run; with ``align_shards`` parameters are reordered.
        may_be_bucketed: whether the bucketed layout may be taken where its step is
            shorter. CPUs without a stated link have no speeds that tell (``Stage``).
    """
    chosen = choose(at_reference(buffers))
    if chosen is None:
        return Layout(
            "contiguous",
            None,
            "--muon-dp-layout contiguous: Megatron's own buckets, of about 40 M "
            "elements: fewer that keep the overlap would not send less on the first "
            "pipeline stage",
        )
    has_speeds = numerics.on_gpu or numerics.config.homes_by_link
    if may_be_bucketed and has_speeds:
        size = sum(buffer.numel for buffer in buffers) // chosen.number
        contiguous = step_time(buffers, numerics, size)
        stock = replace(numerics.config, align_shards=False)
        bucketed = step_time(buffers, Numerics(stock, numerics.device), None)
        if bucketed < contiguous * (1 - _LEAST_GAIN):
            return Layout(
                "bucketed",
                None,
                "--muon-dp-layout bucketed: by --muon-rank-tflops and "
                f"--muon-link-gbytes a step takes {bucketed / contiguous:.0%} of the "
                "time of contiguous. Runs that go on from its checkpoints keep it; the "
                "flag sets it",
            )
    ordered = ", in an order in which shards cut few weights where that sends less"
    return Layout(
        "contiguous",
        chosen.number,
        f"--muon-dp-layout contiguous: about {chosen.cost.buckets} buckets in place of "
        f"{chosen.stock.buckets} on the first pipeline stage, the fewest that keep the "
        f"overlap{ordered if numerics.config.align_shards else ''}. --ddp-num-buckets "
        "sets another number",
    )


def at_reference(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same buffers, each with ``REFERENCE_DP_SIZE`` shards."""
    return [
        replace(buffer, holders=replace(buffer.holders, dp_size=REFERENCE_DP_SIZE))
        for buffer in buffers
    ]


def step_time(
    buffers: Sequence[Buffer], numerics: Numerics, bucket_size: int | None
) -> int:
    """The time of a step by both speeds, with buckets of so many elements; None:
    Megatron's own.
    """
    sizes = (buffer.holders.dp_size for buffer in buffers)
    size = bucket_size or stock_bucket_size(max(sizes))
    placed = [in_place(buffer, numerics, size) for buffer in buffers]
    work = [flops_of(parameters, numerics) for parameters in placed]
    choices: list[Choice] = []
    for at, (parameters, buffer) in enumerate(zip(placed, buffers, strict=True)):
        grid = grid_of_holders(buffer.holders, numerics.config.node_ranks)
        stage = Stage(grid, numerics, choices, sum(work[at + 1 :]))
        choices.append(stage.choose(parameters)[1])
    return choices[-1].time


def in_place(buffer: Buffer, numerics: Numerics, bucket_size: int) -> list[Parameter]:
    """Muon's parameters of a buffer in their places, on all EP ranks."""
    buckets = list(in_buckets(buffer, bucket_size))
    by_bucket: Sequence[Sequence[int]] = [bucket.stock_order() for bucket in buckets]
    if numerics.config.align_shards:
        by_bucket = orders(buckets, buffer.holders, numerics)
    placed = parameters_in(buckets, by_bucket)
    every: list[Parameter] = []
    for ep_rank in range(buffer.holders.ep_size):
        every += [replace(parameter, ep_rank=ep_rank) for parameter in placed]
    return every


def grid_of_holders(holders: Holders, node_ranks: int) -> RankGrid:
    """The ranks that have a buffer, in Megatron's order of ranks."""
    dp_size, tp_size, ep_size = holders.dp_size, holders.tp_size, holders.ep_size
    ranks = [
        [
            tuple((dp * ep_size + ep) * tp_size + tp for dp in range(dp_size))
            for tp in range(tp_size)
        ]
        for ep in range(ep_size)
    ]
    count = dp_size * tp_size * ep_size
    nodes = [rank // node_ranks for rank in range(count)]
    return RankGrid(tuple(map(tuple, ranks)), neighbours_of(nodes))
