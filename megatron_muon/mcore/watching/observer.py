"""The observer of one optimizer's rounds in a logging step, and of its weights before them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, split_with_sizes

from megatron_muon.mcore.watching import whole
from megatron_muon.mcore.watching.rows import PLACE, Table, row_name
from megatron_muon.mcore.watching.sums import StepSums, dot
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.planning.slices import Matrix
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.runtime.round import Shards
from megatron_muon.runtime.update import update_scale

_OF = PLACE["muon"]


class MatrixObserver:
    """Adds what it sees of Muon's matrices to a message. It keeps nothing that is in use.

    Args:
        muon: the optimizer.
        table: the rows of the run.

    Attributes:
        message: takes the sums; a new one for each logging step.
    """

    def __init__(self, muon: DistributedMuon, table: Table) -> None:
        self.message = StepSums(0, torch.device("cpu"))
        self._muon = muon
        self._matrices = muon.plan.matrices
        self._starts = [table.starts["muon", row_name(m.name)] for m in self._matrices]
        self._scales = [update_scale(m.rows, m.cols, muon.config) for m in self._matrices]
        self._vectors: dict[int, Tensor] = {}
        self._watch = Stopwatch()

    def observe_weights(self) -> None:
        """Bring the weights to their matrices' homes, and add spectral norms.

        Every rank of the stage calls it, between two steps.
        """
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
            moves = staged.moves[place]
            rank = whole.effective_rank(matrix, self._matrices[index])
            self._add(index, "ranks", torch.where(moves, rank, 0.0))
            self._add(index, "moved", moves)
            self._add(index, "moved_elements", moves * self._matrices[index].numel)
        self._watch.start(staged.elements)

    def after_newton_schulz(self, staged: Staged) -> None:
        """Orthogonality of the directions."""
        self._watch.stop(staged.elements)
        for place, (index, matrix) in enumerate(_staged_matrices(staged, self._matrices)):
            error = whole.orthogonality_error(matrix, self._matrices[index])
            squares = torch.where(staged.moves[place], error.square(), 0.0)
            self._add(index, "orthogonality_squares", squares)

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
            self._add(index, "elements", float(weight.numel()))
            self._add(index, "update_squares", dot(direction, direction) * scale**2)
            self._add(index, "weight_squares", dot(weight, weight))
            self._add(index, "momentum_squares", dot(momentum, momentum))
            self._add(index, "gradient_squares", dot(grad, grad))
            self._add(index, "gradient_updates", dot(grad, direction) * scale)

    def milliseconds(self) -> float:
        """Time of Newton-Schulz since the last call. On a GPU the host waits for it."""
        return self._watch.milliseconds()

    def _add_spectral_norm(self, index: int, weight: Tensor) -> None:
        like = self._matrices[index]
        vector, iterations = self._vectors.get(index), whole.ITERATIONS
        if vector is None:
            seed = zlib.crc32(like.name.encode())
            vector = whole.start_vector(like, seed, weight.device)
            iterations = whole.FIRST_ITERATIONS
        norm, self._vectors[index] = whole.spectral_norm(weight, like, vector, iterations)
        self._add(index, "spectral_squares", norm.square())
        self._add(index, "matrices", 1.0)
        self._add(index, "home_elements", float(like.numel))

    def _add(self, index: int, name: str, value: Tensor | float) -> None:
        self.message.add(self._starts[index] + _OF[name], value)


class Stopwatch:
    """Time between ``start`` and ``stop``, summed up: on a GPU by events, else by the clock."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []

    def start(self, work: Tensor) -> None:
        """Before work on a tensor."""
        self._note(work, -1.0)

    def stop(self, work: Tensor) -> None:
        """After it."""
        self._note(work, 1.0)

    def _note(self, work: Tensor, sign: float) -> None:
        if work.device.type == "cpu":
            self._seconds += sign * time.perf_counter()
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def milliseconds(self) -> float:
        """The sum since the last call; on a GPU the host waits for the work."""
        total, self._seconds = 1e3 * self._seconds, 0.0
        events, self._events = self._events, []
        for start, stop in zip(events[::2], events[1::2], strict=True):
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
    sizes = [(i, matrices[i].numel) for alike in staged.alike for i in alike.matrices]
    views = split_with_sizes(staged.elements, [size for _, size in sizes])
    return [(index, view) for (index, _), view in zip(sizes, views, strict=True)]
