"""Moving what the plan says: pieces to their homes, directions back.

One gather and one scatter a round over the stage, each an uneven all-to-all of a flat buffer that
is started and, with other work in between, finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon import collectives
from megatron_muon.collectives import Group, Pending
from megatron_muon.plan import ExchangePlan, Matrix, Segment


@dataclass(slots=True)
class Meter:
    """What this rank did in its last step; counted from what is run, not from the plan.

    Attributes:
        steps: Muon steps so far.
        matrices: matrices orthogonalized.
        ns_flops: Newton-Schulz floating-point operations, 2 per multiply-add.
        gather_bytes: sent to homes.
        scatter_bytes: sent back from this home.
    """

    steps: int = 0
    matrices: int = 0
    ns_flops: int = 0
    gather_bytes: int = 0
    scatter_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """All that this rank sent to others for Muon."""
        return self.gather_bytes + self.scatter_bytes

    def start_step(self) -> None:
        self.steps += 1
        self.matrices = self.ns_flops = self.gather_bytes = self.scatter_bytes = 0


@dataclass(slots=True)
class Moving:
    """Half a round that is under way; once it is finished it keeps nothing.

    Attributes:
        target: flat tensors by index, of which ``incoming`` are parts.
        incoming: what each rank's elements are copied to when they are here.
        pending: None where no rank sends anything.
    """

    target: dict[int, Tensor]
    incoming: list[list[Tensor]]
    pending: Pending | None

    @property
    def sent_bytes(self) -> int:
        return self.pending.sent.nbytes if self.pending else 0

    def finish(self) -> dict[int, Tensor]:
        if self.pending is not None:
            _distribute(self.pending.wait(), self.incoming)
        target, self.target = self.target, {}
        self.incoming, self.pending = [], None
        return target


@dataclass(slots=True)
class Gathering:
    """A round that is being gathered.

    Attributes:
        moving: its matrices, in staging order.
        moves: 1 for each segment that has a gradient: those that are kept, then those that arrive.
    """

    moving: Moving
    moves: Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """A matrix at its home.

    Attributes:
        elements: ``(rows, cols)`` contiguous, in the row and column order of TP = 1.
        moves: bool scalar: a gradient of it is not zero in this step.
    """

    elements: Tensor
    moves: Tensor


class Exchange:
    """Runs a plan for one rank of the stage.

    Args:
        plan: the stage's.
        rank: this rank, as in ``plan.grid``.
        group: process group of the stage.
        dtype: what elements travel in.
        device: where matrices are assembled.
        meter: counts the bytes sent.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        rank: int,
        group: Group,
        dtype: torch.dtype,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._plan = plan
        self._group = group
        self._dtype = dtype
        self._device = device
        self._meter = meter
        self._routes = plan.routes(rank)
        self._homes = plan.homes_by_round(rank)
        # The same on every rank of the stage: either all of them communicate in a round or none.
        self._silent = plan.silent_rounds()
        self._pieces = plan.pieces(rank)
        self._places = [self._homes_of_segments(round) for round in range(len(plan.rounds))]

    def start_gather(
        self, round: int, pieces: Mapping[int, Tensor], grads: Mapping[int, Tensor]
    ) -> Gathering:
        """Start to bring every matrix of a round to its home.

        A message has, after the elements, a 1 or a 0 for each of its segments: whether there is a
        gradient that is not zero.

        Args:
            round: its number.
            pieces: for each of its parameters with a piece here, the local elements, ``(n,)``.
            grads: likewise, the gradients of this step.
        """
        matrices, routes = self._plan.matrices, self._routes[round]
        staged = {index: self._empty(matrices[index].numel) for index in self._homes[round]}
        for segment in routes.kept:
            _staged(staged, segment).copy_(self._local(pieces, segment))
        outgoing = self._by_rank(routes.gather_to, lambda s: self._local(pieces, s))
        incoming = self._by_rank(routes.gather_from, lambda s: _staged(staged, s))
        to_homes = [s for rank in sorted(routes.gather_to) for s in routes.gather_to[rank]]
        here = self._moves(grads, [*routes.kept, *to_homes])
        moves = self._empty(self._places[round].numel())
        kept = len(routes.kept)
        moves[:kept].copy_(here[:kept])
        _append_runs(outgoing, here[kept:])
        _append_runs(incoming, moves[kept:])
        moving = self._start("muon/gather", round, staged, outgoing=outgoing, incoming=incoming)
        self._meter.gather_bytes += moving.sent_bytes
        return Gathering(moving, moves)

    def finish_gather(self, round: int, gathering: Gathering) -> dict[int, Gathered]:
        """Each matrix of the round whose home this rank is."""
        staged, homes = gathering.moving.finish(), self._homes[round]
        counts = gathering.moves.new_zeros(len(homes))
        counts.index_add_(0, self._places[round], gathering.moves)
        moves = dict(zip(homes, (counts > 0).unbind(), strict=True))
        return {
            index: Gathered(assemble(staged.pop(index), self._plan.matrices[index]), moves[index])
            for index in list(staged)
        }

    def _moves(self, grads: Mapping[int, Tensor], segments: Sequence[Segment]) -> Tensor:
        """1 for each segment whose gradient is not all zero, ``(len(segments),)``."""
        if not segments:
            return self._empty(0)
        parts = [self._local(grads, segment) for segment in segments]
        norms = torch.stack(torch._foreach_norm(parts, float("inf")))
        return (norms != 0).to(self._dtype)

    def _homes_of_segments(self, round: int) -> Tensor:
        """For each segment that is kept or arrives, the place of its matrix among the homes."""
        routes, homes = self._routes[round], self._homes[round]
        place = {index: at for at, index in enumerate(homes)}
        arriving = [s for rank in sorted(routes.gather_from) for s in routes.gather_from[rank]]
        places = [place[segment.matrix] for segment in (*routes.kept, *arriving)]
        return torch.tensor(places, dtype=torch.int64, device=self._device)

    def start_scatter(self, round: int, directions: dict[int, Tensor]) -> Moving:
        """Start to send the directions of a round to the ranks that hold pieces of its matrices.

        Args:
            round: its number.
            directions: ``(rows, cols)`` for each matrix that ``finish_gather`` returned; emptied,
                so that all of them are never there twice.
        """
        routes = self._routes[round]
        matrices = self._plan.matrices
        staged = {i: stage(directions.pop(i), matrices[i]) for i in list(directions)}
        held = (i for i in self._plan.rounds[round] if i in self._pieces)
        pieces = {index: self._empty(self._pieces[index].size) for index in held}
        for segment in routes.kept:
            self._local(pieces, segment).copy_(_staged(staged, segment))
        moving = self._start(
            "muon/scatter",
            round,
            pieces,
            outgoing=self._by_rank(routes.scatter_to, lambda s: _staged(staged, s)),
            incoming=self._by_rank(routes.scatter_from, lambda s: self._local(pieces, s)),
        )
        self._meter.scatter_bytes += moving.sent_bytes
        return moving

    def finish_scatter(self, moving: Moving) -> dict[int, Tensor]:
        """For each parameter of the round with a piece here, its elements' directions, ``(n,)``."""
        return moving.finish()

    def _start(
        self,
        name: str,
        round: int,
        target: dict[int, Tensor],
        *,
        outgoing: list[list[Tensor]],
        incoming: list[list[Tensor]],
    ) -> Moving:
        """Start to fill ``incoming[r]``, which lies in ``target``, with what rank r sends."""
        if self._silent[round]:
            return Moving(target, [], None)
        sent = _concatenate(outgoing, self._dtype, self._device)
        pending = collectives.start_all_to_all(
            name, sent, _sizes(outgoing), _sizes(incoming), self._group
        )
        return Moving(target, incoming, pending)

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def _by_rank(
        self, segments: Mapping[int, list[Segment]], tensor_of: Callable[[Segment], Tensor]
    ) -> list[list[Tensor]]:
        return [[tensor_of(s) for s in segments.get(r, ())] for r in range(self._plan.size)]

    def _local(self, pieces: Mapping[int, Tensor], segment: Segment) -> Tensor:
        elements = segment.elements.shift(-self._pieces[segment.parameter].start)
        return pieces[segment.parameter][elements.start : elements.stop]


def _append_runs(tensors_by_rank: list[list[Tensor]], flags: Tensor) -> None:
    """Give each rank's tensors the run of flags that is theirs: one for each of them."""
    runs = torch.split(flags, [len(tensors) for tensors in tensors_by_rank])
    for tensors, run in zip(tensors_by_rank, runs, strict=True):
        if tensors:
            tensors.append(run)


def _sizes(tensors_by_rank: list[list[Tensor]]) -> list[int]:
    return [sum(tensor.numel() for tensor in tensors) for tensors in tensors_by_rank]


def _concatenate(
    tensors_by_rank: list[list[Tensor]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    tensors = [tensor for tensors in tensors_by_rank for tensor in tensors]
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=dtype, device=device)


def _distribute(flat: Tensor, tensors_by_rank: list[list[Tensor]]) -> None:
    tensors = [tensor for tensors in tensors_by_rank for tensor in tensors]
    if tensors:
        runs = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, list(runs))


def _staged(staged: Mapping[int, Tensor], segment: Segment) -> Tensor:
    return staged[segment.matrix][segment.staged.start : segment.staged.stop]


def assemble(staged: Tensor, matrix: Matrix) -> Tensor:
    """From staging order to ``(rows, cols)``: put the column parts side by side."""
    if matrix.column_parts == 1:
        return staged.view(matrix.rows, matrix.cols)
    parts, blocks = matrix.column_parts, matrix.column_blocks
    cut = staged.view(parts, matrix.rows, blocks, matrix.cols // (parts * blocks))
    return cut.permute(1, 2, 0, 3).reshape(matrix.rows, matrix.cols)


def stage(direction: Tensor, matrix: Matrix) -> Tensor:
    """From ``(rows, cols)`` to staging order, flat."""
    parts, blocks = matrix.column_parts, matrix.column_blocks
    cut = direction.reshape(matrix.rows, blocks, parts, matrix.cols // (parts * blocks))
    return cut.permute(2, 0, 1, 3).reshape(-1)
