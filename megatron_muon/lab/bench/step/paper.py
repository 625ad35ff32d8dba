"""Algorithm 1 of the paper (arXiv 2502.16982) over Megatron's shards, as a row of the benchmark.

Every rank that holds a piece of a matrix gathers the whole matrix, orthogonalizes it, and keeps its
own piece of the direction. Buckets follow one another, each with one collective over DP and one
over TP. Momentum, kernels, dtype and update are those of ``DistributedMuon``: only the division of
work between ranks differs.

A rank sends each of its pieces to the other DP ranks that hold some of the matrix, and the matrix's
TP slice to the other TP ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_muon.mcore.wiring.buffers.shards import device_of
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.slices import Slice
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group
from megatron_muon.runtime.optimizer import DistributedMuon, ParamGroups
from megatron_muon.runtime.round import Shards
from megatron_muon.runtime.states import States
from megatron_muon.runtime.update import Elementwise


@dataclass(frozen=True, slots=True)
class BucketRoutes:
    """A rank's part in one bucket.

    Attributes:
        matrices: indices of the matrices that it orthogonalizes.
        slices: each TP rank's segments of those matrices that TP splits, in the same order.
        kept: segments that the rank holds.
        send_to, receive_from: segments to send or receive, by DP rank.
        silent: whether no rank of its DP group sends anything.
    """

    matrices: tuple[int, ...]
    slices: tuple[tuple[Slice, ...], ...]
    kept: tuple[Slice, ...]
    send_to: tuple[tuple[Slice, ...], ...]
    receive_from: tuple[tuple[Slice, ...], ...]
    silent: bool


def routes(plan: ExchangePlan, rank: int) -> list[BucketRoutes]:
    """A stage's rank's routes of every bucket, in the same order on all ranks."""
    ep, tp, dp = next((ep, tp, dp) for ep, tp, dp, other in plan.grid.places() if other == rank)
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, parameter in enumerate(plan.parameters):
        if parameter.ep_rank == ep:
            buckets[parameter.buffer, parameter.bucket.start].append(index)
    of_parameter: dict[int, list[Slice]] = defaultdict(list)
    for segment in plan.slices:
        of_parameter[segment.parameter].append(segment)
    rows = plan.grid.of_ep(ep)
    return [
        _bucket(plan, [s for index in sorted(bucket) for s in of_parameter[index]], rows, tp, dp)
        for _, bucket in sorted(buckets.items())
    ]


def _bucket(
    plan: ExchangePlan,
    segments: Sequence[Slice],
    rows: Sequence[Sequence[int]],
    tp: int,
    dp: int,
) -> BucketRoutes:
    row = rows[tp]
    mine = [segment for segment in segments if segment.rank in row]
    sharers: dict[int, set[int]] = defaultdict(set)  # DP ranks by matrix
    for segment in mine:
        sharers[segment.matrix].add(row.index(segment.rank))
    matrices = tuple(sorted(index for index, ranks in sharers.items() if dp in ranks))
    kept = tuple(segment for segment in mine if segment.rank == row[dp])
    split = [
        s for s in segments if s.matrix in matrices and not plan.parameters[s.parameter].replicated
    ]
    return BucketRoutes(
        matrices=matrices,
        slices=tuple(
            tuple(sorted((s for s in split if s.rank in other), key=_in_order)) for other in rows
        ),
        kept=kept,
        send_to=tuple(
            tuple(s for s in kept if other != dp and other in sharers[s.matrix])
            for other in range(len(row))
        ),
        receive_from=tuple(
            tuple(s for s in mine if s.rank == other != row[dp] and s.matrix in matrices)
            for other in row
        ),
        silent=all(len(ranks) == 1 for ranks in sharers.values()),
    )


def _in_order(segment: Slice) -> tuple[int, int]:
    """A sort key with the same order on all TP ranks."""
    return segment.parameter, segment.elements.start


class PaperMuon(DistributedMuon):
    """``DistributedMuon`` with the paper's communication in place of the exchange."""

    dp_group: Group
    tp_group: Group
    rank: int
    device: torch.device
    buckets: list[BucketRoutes]
    by_bucket: list[Elementwise]

    @staticmethod
    def take_over(muon: DistributedMuon, dist_opt: Any, rank: int, tp_group: Group) -> None:
        """Turn the Muon inside Megatron's ``dist_opt`` into a ``PaperMuon``."""
        muon.__class__ = PaperMuon
        assert isinstance(muon, PaperMuon)
        muon.rank, muon.tp_group, muon.dp_group = rank, tp_group, dist_opt.data_parallel_group
        muon.device, muon.buckets = device_of(dist_opt.model_chunks), routes(muon.plan, rank)
        muon.by_bucket = [muon.elementwise() for _ in muon.buckets]

    @torch.no_grad()
    def step(self, groups: ParamGroups, states: States, step_adamw: Any) -> None:
        """Update Muon's parameters and AdamW's, bucket by bucket."""
        self.meter.start_step()
        with self._phase("muon/adamw"):
            step_adamw()
        shards = dict(self._shards(groups, states))
        for bucket, elementwise in zip(self.buckets, self.by_bucket, strict=True):
            runs = sorted(bucket.kept, key=_in_order)
            with self._phase("muon/momentum"):
                pieces = self._moved(elementwise, shards, runs)
            staged = self._gather(bucket, pieces)
            with self._phase("muon/newton_schulz"):
                directions = {index: self._direct(index, x) for index, x in staged.items()}
            with self._phase("muon/update"):
                of_runs = [_part(directions, segment) for segment in runs]
                self._update_runs(elementwise, shards, runs, of_runs)

    def _moved(
        self, elementwise: Elementwise, shards: Shards, runs: Sequence[Slice]
    ) -> dict[int, Tensor]:
        """Advance momentum; return the elements to orthogonalize of each parameter's piece."""
        held = list(dict.fromkeys(segment.parameter for segment in runs))
        dtype = TORCH_DTYPE[self.numerics.travels]
        pieces = {index: torch.empty_like(shards[index].grad, dtype=dtype) for index in held}
        elementwise.advance_momentum(
            [shards[index].momentum_buffer for index in held],
            [shards[index].grad for index in held],
            list(pieces.values()),
            torch.empty(0, dtype=dtype, device=self.device),
            (),
            momentum=self.config.momentum,
            nesterov=self.config.nesterov,
        )
        return pieces

    def _direct(self, index: int, elements: Tensor) -> Tensor:
        matrix, one = self.plan.matrices[index], torch.ones(1, dtype=torch.bool, device=self.device)
        directions = orthogonalize_staged(
            elements,
            one,
            self.numerics,
            rows=matrix.rows,
            cols=matrix.cols,
            column_parts=matrix.column_parts,
            column_blocks=matrix.column_blocks,
            apart=matrix.units > 1,
        )
        self.meter.matrices += matrix.units
        self.meter.ns_flops += matrix.units * ns_flops(*matrix.unit, self.numerics)
        return directions

    def _update_runs(
        self,
        elementwise: Elementwise,
        shards: Shards,
        runs: Sequence[Slice],
        directions: Sequence[Tensor],
    ) -> None:
        local = self.own.shards
        params, factors, decays = [], [], []
        for segment in runs:
            shard = shards[segment.parameter]
            span = segment.elements.shift(-local[segment.parameter].start)
            params.append(shard.main_param[span.start : span.stop])
            factors.append(shard.lr * self._work.scales[segment.matrix])
            decays.append(shard.lr * shard.weight_decay)
        elementwise.apply_updates(params, directions, factors, decays)

    def _gather(self, bucket: BucketRoutes, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Whole matrices of a bucket, for those with a piece on this rank, in staging order."""
        local = self.own.shards

        def own(segment: Slice) -> Tensor:
            span = segment.elements.shift(-local[segment.parameter].start)
            return pieces[segment.parameter][span.start : span.stop]

        like = torch.empty(0, dtype=TORCH_DTYPE[self.numerics.travels], device=self.device)
        with self._phase("muon/dp_gather"):
            staged = {
                index: like.new_empty(self.plan.matrices[index].numel) for index in bucket.matrices
            }
            for segment in bucket.kept:
                _part(staged, segment).copy_(own(segment))
            if not bucket.silent:
                sent = _joined([own(s) for to in bucket.send_to for s in to], like)
                received = collectives.start_all_to_all(
                    "muon/dp_gather",
                    sent,
                    [_numel(to) for to in bucket.send_to],
                    [_numel(source) for source in bucket.receive_from],
                    self.dp_group,
                ).wait()
                _distribute(received, staged, [s for r in bucket.receive_from for s in r])
        if self.tp_group.size() > 1 and bucket.slices[self.tp_group.rank()]:
            with self._phase("muon/tp_gather"):
                here = bucket.slices[self.tp_group.rank()]
                slices = collectives.all_gather_flat(
                    "muon/tp_gather",
                    _joined([_part(staged, s) for s in here], like),
                    self.tp_group,
                )
                for tp_rank, elements in enumerate(slices):
                    if tp_rank != self.tp_group.rank():
                        _distribute(elements, staged, bucket.slices[tp_rank])
        return staged


def _part(staged: Mapping[int, Tensor], segment: Slice) -> Tensor:
    return staged[segment.matrix][segment.staged.start : segment.staged.stop]


def _numel(segments: Sequence[Slice]) -> int:
    return sum(segment.elements.size for segment in segments)


def _joined(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(tensors)) if tensors else like.new_empty(0)


def _distribute(elements: Tensor, staged: Mapping[int, Tensor], segments: Sequence[Slice]) -> None:
    for part, segment in zip(
        torch.split(elements, [s.elements.size for s in segments]), segments, strict=True
    ):
        _part(staged, segment).copy_(part)
