"""Algorithm 1 of the paper (arXiv 2502.16982) over Megatron's shards, counted and priced.

Every rank that holds a piece of a matrix gathers the whole matrix, orthogonalizes it, and keeps its
own piece of the direction. Buckets follow one another, each with one exchange over DP ranks that
share a matrix and one over TP ranks. This is what row ``paper`` of ``megatron-muon bench step``
runs (``bench.step.paper``): a test holds bytes, messages and flops to its routes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.kernels import Cost, foreach, newton_schulz
from megatron_muon.lab.pricing.step import (
    ADAMW,
    MOMENTUM,
    NEWTON_SCHULZ,
    STAGING,
    UPDATE,
    Optimizer,
    StepTime,
    adamw_of,
    fused_momentum,
    fused_update,
    result_of,
    stage_size,
)
from megatron_muon.lab.pricing.streams import Streams, sent_in_groups
from megatron_muon.lab.pricing.traffic import Traffic
from megatron_muon.lab.pricing.work import Shape
from megatron_muon.orthogonalize.iteration import ns_flops, scratch_elements
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.slices import Matrix
from megatron_muon.settings.config import MuonConfig

_Bucket = tuple[int, int, int]  # EP rank, buffer, first element


@dataclass(frozen=True, slots=True)
class BucketWork:
    """One bucket of each EP rank; lists are by rank.

    Attributes:
        held: elements of the rank's pieces.
        staged: elements of the matrices that it orthogonalizes.
        shapes: number of these matrices by shape.
        dp, tp: groups of ranks that send to each other, over DP (one for each matrix and TP rank)
            and over TP.
    """

    held: list[int]
    staged: list[int]
    shapes: list[Counter[Shape]]
    dp: list[dict[int, int]] = field(default_factory=list)
    tp: list[dict[int, int]] = field(default_factory=list)


def buckets_of(plan: ExchangePlan) -> list[BucketWork]:
    """Every bucket's work, in the order in which ranks come to them.

    Args:
        plan: the exchange plan of the same parameters; its homes and rounds do not matter.
    """
    numbers = _numbers(plan)
    made = [_idle(plan.size) for _ in range(max(numbers.values(), default=-1) + 1)]
    work_of = [
        made[numbers[parameter.ep_rank, parameter.buffer, parameter.bucket.start]]
        for parameter in plan.parameters
    ]
    tp_rank_of = plan.grid.tp_ranks()
    held: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    parameter_of: dict[int, int] = {}
    for segment in plan.slices:
        work_of[segment.parameter].held[segment.rank] += segment.elements.size
        held[segment.matrix, tp_rank_of[segment.rank]][segment.rank] += segment.elements.size
        parameter_of[segment.matrix] = segment.parameter
    for (index, _), by_rank in held.items():
        _share(work_of[parameter_of[index]], plan.matrices[index], by_rank, plan.itemsize)
    _over_tp(plan, work_of, held, parameter_of)
    return made


def flops_of(
    buckets: Sequence[BucketWork], config: MuonConfig, device: Device = "cuda"
) -> list[int]:
    """Newton-Schulz flops of each rank."""
    numerics = Numerics(config, device)
    return [
        sum(
            count * ns_flops(*shape, numerics)
            for work in buckets
            for shape, count in work.shapes[rank].items()
        )
        for rank in range(len(buckets[0].shapes) if buckets else 0)
    ]


def traffic(buckets: Sequence[BucketWork], nodes: Sequence[int]) -> Traffic:
    """What each rank sends; a message for each rank that it has elements for in a bucket."""
    inside, between, messages = ([0] * len(nodes) for _ in range(3))
    peers = [0] * len(nodes)
    for work in buckets:
        for groups in (work.dp, work.tp):
            for rank, sent in sent_in_groups(groups, nodes).items():
                inside[rank] += sent.out
                between[rank] += sent.out_far
                messages[rank] += sent.peers
                peers[rank] |= sent.members
    counts = tuple(max(0, members.bit_count() - 1) for members in peers)
    return Traffic(tuple(inside), tuple(between), tuple(messages), counts)


def price_paper(
    optimizers: Sequence[Optimizer],
    buckets: Sequence[Sequence[BucketWork]],
    config: MuonConfig,
    hardware: Hardware,
    *,
    device: Device = "cuda",
    nodes: Sequence[int] | None = None,
) -> StepTime:
    """The times of a stage's step: AdamW's part, then bucket by bucket with nothing overlapped.

    Args:
        optimizers: the stage's.
        buckets: ``buckets_of`` each.
        config, hardware, device, nodes: see ``step.price_step``.
    """
    numerics, streams = Numerics(config, device), Streams(hardware, stage_size(optimizers), nodes)
    for optimizer, every in zip(optimizers, buckets, strict=True):
        streams.run(ADAMW, partial(adamw_of, hardware, optimizer.rest))
        itemsize = optimizer.plan.itemsize
        for work in every:
            streams.run(MOMENTUM, partial(fused_momentum, hardware, work.held, itemsize))
            for groups in (work.dp, work.tp):
                streams.wait(streams.share(groups))
            streams.run(STAGING, partial(_staged, hardware, work, itemsize))
            streams.run(NEWTON_SCHULZ, partial(_orthogonalized, hardware, work, numerics))
            streams.run(UPDATE, partial(fused_update, hardware, work.held, itemsize))
    return result_of(streams, tuple(map(len, buckets)))


def peaks(buckets: Sequence[BucketWork], itemsize: int) -> list[int]:
    """Bytes of each rank above the state: pieces, matrices and messages of one bucket at a time.

    The matrices of a bucket are there together, with the scratch memory of the largest one.
    """
    most = [0] * (len(buckets[0].shapes) if buckets else 0)
    for work in buckets:
        for rank, shapes in enumerate(work.shapes):
            scratch = max((scratch_elements(*shape) for shape in shapes), default=0)
            arriving = work.staged[rank] - work.held[rank]
            over = work.held[rank] + work.staged[rank] + max(scratch, arriving)
            most[rank] = max(most[rank], over * itemsize)
    return most


def _numbers(plan: ExchangePlan) -> dict[_Bucket, int]:
    """The turn of each bucket: EP ranks go through buckets of their own at the same time."""
    places: dict[int, list[_Bucket]] = defaultdict(list)
    for bucket in sorted({(p.ep_rank, p.buffer, p.bucket.start) for p in plan.parameters}):
        places[bucket[0]].append(bucket)
    return {bucket: at for of_ep in places.values() for at, bucket in enumerate(of_ep)}


def _idle(size: int) -> BucketWork:
    return BucketWork([0] * size, [0] * size, [Counter() for _ in range(size)])


def _share(work: BucketWork, matrix: Matrix, by_rank: dict[int, int], itemsize: int) -> None:
    """All ranks of one TP rank that hold some of a matrix send it to each other."""
    for rank in by_rank:
        work.shapes[rank][matrix.unit] += matrix.units
        work.staged[rank] += matrix.numel
    if len(by_rank) > 1:
        work.dp.append({rank: elements * itemsize for rank, elements in by_rank.items()})


def _over_tp(
    plan: ExchangePlan,
    work_of: Sequence[BucketWork],
    held: dict[tuple[int, int], dict[int, int]],
    parameter_of: dict[int, int],
) -> None:
    """Ranks that gathered a TP slice of a matrix over DP send it to the other TP ranks."""
    tp_size = plan.grid.tp_size
    if tp_size == 1:
        return
    sent: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # by bucket and rank
    works = {id(work): work for work in work_of}
    for (index, _), by_rank in held.items():
        if not plan.parameters[parameter_of[index]].replicated:
            of_bucket = sent[id(work_of[parameter_of[index]])]
            for rank in by_rank:
                of_bucket[rank] += plan.matrices[index].numel // tp_size * plan.itemsize
    columns = _tp_columns(plan)
    for bucket, by_rank in sent.items():
        works[bucket].tp.extend(
            {rank: by_rank[rank] for rank in column}
            for column in columns
            if any(rank in by_rank for rank in column)
        )


def _tp_columns(plan: ExchangePlan) -> list[list[int]]:
    """The TP ranks of each EP and DP rank."""
    columns: dict[tuple[int, int], list[int]] = defaultdict(list)
    for ep_rank, _, dp_rank, rank in plan.grid.places():
        columns[ep_rank, dp_rank].append(rank)
    return list(columns.values())


def _staged(hardware: Hardware, work: BucketWork, itemsize: int, rank: int) -> Cost:
    """Copies of pieces and of what arrives into the matrices."""
    tensors = sum(work.shapes[rank].values())
    return foreach(hardware, work.staged[rank], tensors, 2 * itemsize)


def _orthogonalized(hardware: Hardware, work: BucketWork, numerics: Numerics, rank: int) -> Cost:
    """One matrix after another, as its implementations do."""
    cost = Cost()
    for (rows, cols), count in work.shapes[rank].items():
        cost += newton_schulz(hardware, rows, cols, 1, numerics).times(count)
    return cost
