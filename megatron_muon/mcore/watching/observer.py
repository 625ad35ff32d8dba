"""The observer of one optimizer's rounds in a logging step, and of its weights before them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.mcore.watching import whole
from megatron_muon.mcore.watching.rows import Message, dot, row_name
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.planning.slices import Matrix
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.runtime.round import Shards
from megatron_muon.runtime.update import update_scale


class MatrixObserver:
    """Adds what it sees of Muon's matrices to a message. It keeps nothing that is in use."""

    def __init__(self, muon: DistributedMuon) -> None:
        self._muon = muon
        self._matrices = muon.plan.matrices
        self._rows = [row_name(matrix.name) for matrix in self._matrices]
        self._scales = [update_scale(m.rows, m.cols, muon.config) for m in self._matrices]
        self._vectors: dict[int, Tensor] = {}
        self.stopwatch = Stopwatch()  # of Newton-Schulz
        self._message: Message | None = None

    def observe_weights(self, message: Message) -> None:
        """Bring the weights to their matrices' homes, and add spectral norms.

        Every rank of the stage calls it, between two steps. The sums of the next one go into
        ``message``, too.
        """
        self._message = message
        main_params = self._muon.main_params
        for round in self._muon.exchange.rounds:
            leaving = round.leaving()
            for run, gap in zip(_runs(round.table, main_params), leaving.slices, strict=True):
                if gap is not None:
                    gap.copy_(run)
            leaving.moves.fill_(1)
            staged = round.finish_gather(round.start_gather(leaving))
            for index, weight in _staged_matrices(staged, self._matrices):
                self._add_spectral_norm(index, weight)

    def before_newton_schulz(self, staged: Staged) -> None:
        """Effective rank of the input of Newton-Schulz."""
        for place, (index, matrix) in enumerate(_staged_matrices(staged, self._matrices)):
            like, moves = self._matrices[index], staged.moves[place]
            rank = torch.where(moves, whole.effective_rank(matrix, like), 0.0)
            self._add(index, ranks=rank, moved=moves, moved_elements=moves * like.numel)
        self.stopwatch.mark(staged.elements)

    def after_newton_schulz(self, staged: Staged) -> None:
        """Orthogonality of the directions."""
        self.stopwatch.mark(staged.elements)
        for place, (index, matrix) in enumerate(_staged_matrices(staged, self._matrices)):
            error = whole.orthogonality_error(matrix, self._matrices[index])
            squares = torch.where(staged.moves[place], error.square(), 0.0)
            self._add(index, orthogonality_squares=squares)

    def before_update(
        self, table: RoundTable, shards: Shards, directions: Sequence[Tensor]
    ) -> None:
        """Sums over the elements that are held here."""
        weights, momenta, grads = (
            _runs(table, {index: getattr(shard, name) for index, shard in shards.items()})
            for name in ("main_param", "momentum_buffer", "grad")
        )
        runs = zip(table.matrices, directions, weights, momenta, grads, strict=True)
        for index, direction, weight, momentum, grad in runs:
            scale = self._scales[index]
            self._add(
                index,
                elements=weight.numel(),
                update_squares=dot(direction, direction) * scale**2,
                weight_squares=dot(weight, weight),
                momentum_squares=dot(momentum, momentum),
                gradient_squares=dot(grad, grad),
                gradient_updates=dot(grad, direction) * scale,
            )

    def _add_spectral_norm(self, index: int, weight: Tensor) -> None:
        like = self._matrices[index]
        vector, iterations = self._vectors.get(index), whole.ITERATIONS
        if vector is None:
            seed = zlib.crc32(like.name.encode())
            vector = whole.start_vector(like, seed, weight.device)
            iterations = whole.FIRST_ITERATIONS
        norm, self._vectors[index] = whole.spectral_norm(weight, like, vector, iterations)
        self._add(index, spectral_squares=norm.square(), matrices=1, home_elements=like.numel)

    def _add(self, index: int, **values: Tensor | float) -> None:
        assert self._message is not None
        self._message.add("muon", self._rows[index], **values)


class Stopwatch:
    """Time between pairs of marks, summed up: on a GPU by events, else by the clock."""

    def __init__(self) -> None:
        self._marks: list[Any] = []

    def mark(self, work: Tensor) -> None:
        """Before work on a tensor, and after it."""
        if work.device.type == "cpu":
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._marks[-1].record()

    def milliseconds(self) -> float:
        """The sum since the last call; on a GPU the host waits for the work."""
        total, marks, self._marks = 0.0, self._marks, []
        for start, stop in zip(marks[::2], marks[1::2], strict=True):
            if isinstance(start, float):
                total += 1e3 * (stop - start)
            else:
                stop.synchronize()
                total += start.elapsed_time(stop)
        return total


def _runs(table: RoundTable, held: Mapping[int, Tensor]) -> list[Tensor]:
    """One tensor of each parameter, cut into the round's runs."""
    return [
        run
        for index, sizes in table.parameters
        for run in split_with_sizes(held[index], list(sizes))
    ]


def _staged_matrices(staged: Staged, matrices: Sequence[Matrix]) -> list[tuple[int, Tensor]]:
    """``(index in the plan, its elements)`` of each matrix at home here, in staged order."""
    indices = [index for alike in staged.alike for index in alike.matrices]
    views = split_with_sizes(staged.elements, [matrices[index].numel for index in indices])
    return list(zip(indices, views, strict=True))
