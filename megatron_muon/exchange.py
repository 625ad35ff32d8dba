"""Moving what the plan says: pieces to their homes, directions back.

One gather and one scatter a step over the stage, each an uneven all-to-all of a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_muon import collectives
from megatron_muon.collectives import Group
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
        self._rank = rank
        self._routes = plan.routes(self._rank)
        # The same on every rank of the stage: either all of them communicate or none does.
        self._silent = not any(plan.sent_bytes())
        self._pieces = plan.pieces(rank)

    def gather(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Bring every matrix to its home.

        Args:
            pieces: for each parameter with a piece here, its local elements, ``(n,)``.

        Returns:
            For each matrix whose home this rank is, ``(rows, cols)`` contiguous, in the row and
            column order of TP = 1.
        """
        matrices = self._plan.matrices
        staged = {
            index: torch.empty(matrices[index].numel, dtype=self._dtype, device=self._device)
            for index in self._plan.homes(self._rank)
        }
        for segment in self._routes.kept:
            _staged(staged, segment).copy_(self._local(pieces, segment))
        routes = self._routes
        self._meter.gather_bytes += self._all_to_all(
            "muon/gather",
            outgoing=self._by_rank(routes.gather_to, lambda s: self._local(pieces, s)),
            incoming=self._by_rank(routes.gather_from, lambda s: _staged(staged, s)),
        )
        return {index: _assemble(flat, matrices[index]) for index, flat in staged.items()}

    def scatter(self, directions: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send every direction back to the ranks that hold pieces of its matrix.

        Args:
            directions: as returned by ``gather``: ``(rows, cols)`` for each matrix homed here.

        Returns:
            For each parameter with a piece here, its local elements' directions, ``(n,)``.
        """
        staged = {i: _stage(d, self._plan.matrices[i]) for i, d in directions.items()}
        pieces = {
            index: torch.empty(piece.size, dtype=self._dtype, device=self._device)
            for index, piece in self._pieces.items()
        }
        for segment in self._routes.kept:
            self._local(pieces, segment).copy_(_staged(staged, segment))
        routes = self._routes
        self._meter.scatter_bytes += self._all_to_all(
            "muon/scatter",
            outgoing=self._by_rank(routes.scatter_to, lambda s: _staged(staged, s)),
            incoming=self._by_rank(routes.scatter_from, lambda s: self._local(pieces, s)),
        )
        return pieces

    def _all_to_all(
        self, name: str, *, outgoing: list[list[Tensor]], incoming: list[list[Tensor]]
    ) -> int:
        """Fill ``incoming[r]`` with what rank r sends; returns the bytes sent to other ranks."""
        if self._silent:
            return 0
        sent = _concatenate(outgoing, self._dtype, self._device)
        received = collectives.all_to_all(
            name, sent, _sizes(outgoing), _sizes(incoming), self._group
        )
        _distribute(received, incoming)
        return sent.numel() * sent.element_size()

    def _by_rank(
        self, segments: Mapping[int, list[Segment]], tensor_of: Callable[[Segment], Tensor]
    ) -> list[list[Tensor]]:
        return [[tensor_of(s) for s in segments.get(r, ())] for r in range(self._plan.size)]

    def _local(self, pieces: Mapping[int, Tensor], segment: Segment) -> Tensor:
        elements = segment.elements.shift(-self._pieces[segment.parameter].start)
        return pieces[segment.parameter][elements.start : elements.stop]


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


def _assemble(staged: Tensor, matrix: Matrix) -> Tensor:
    """From staging order to ``(rows, cols)``: put the column parts side by side."""
    if matrix.column_parts == 1:
        return staged.view(matrix.rows, matrix.cols)
    parts, blocks = matrix.column_parts, matrix.column_blocks
    cut = staged.view(parts, matrix.rows, blocks, matrix.cols // (parts * blocks))
    return cut.permute(1, 2, 0, 3).reshape(matrix.rows, matrix.cols)


def _stage(direction: Tensor, matrix: Matrix) -> Tensor:
    """From ``(rows, cols)`` to staging order, flat."""
    parts, blocks = matrix.column_parts, matrix.column_blocks
    cut = direction.reshape(matrix.rows, blocks, parts, matrix.cols // (parts * blocks))
    return cut.permute(2, 0, 1, 3).reshape(-1)
