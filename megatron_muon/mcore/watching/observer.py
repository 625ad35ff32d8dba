"""The observer of one optimizer's rounds in a logging step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, split_with_sizes

from megatron_muon.mcore.watching.rows import Message, dot, row_name
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.runtime.round import Shards
from megatron_muon.runtime.update import update_scale


class MatrixObserver:
    """Adds what it sees of Muon's matrices to a message. It keeps nothing that is in use."""

    def __init__(self, muon: DistributedMuon, message: Message) -> None:
        self._matrices, self._message = muon.plan.matrices, message
        self._rows = [row_name(matrix.name) for matrix in self._matrices]
        self._scales = [update_scale(*m.whole, muon.config) for m in self._matrices]

    def before_newton_schulz(self, staged: Staged) -> None:
        """Count the matrices at home here, and those with a gradient."""
        indices = [index for alike in staged.alike for index in alike.matrices]
        for index, moves in zip(indices, staged.moves, strict=True):
            numel = self._matrices[index].numel
            counts = {"matrices": 1, "home_elements": numel}
            self._add(index, **counts, moved=moves, moved_elements=moves * numel)

    def before_update(
        self, table: RoundTable, shards: Shards, directions: Sequence[Tensor]
    ) -> None:
        """Sums over the elements that are held here."""
        weights, momenta, grads = (
            _slices(table, {index: getattr(shards[index], name) for index, _ in table.parameters})
            for name in ("main_param", "momentum_buffer", "grad")
        )
        slices = zip(table.matrices, directions, weights, momenta, grads, strict=True)
        for index, direction, weight, momentum, grad in slices:
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

    def _add(self, index: int, **values: Tensor | float) -> None:
        self._message.add("muon", self._rows[index], **values)


def _slices(table: RoundTable, held: Mapping[int, Tensor]) -> list[Tensor]:
    """One tensor of each parameter, cut into the round's slices."""
    return [
        piece
        for index, sizes in table.parameters
        for piece in split_with_sizes(held[index], list(sizes))
    ]
