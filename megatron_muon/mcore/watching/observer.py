"""The observer of one optimizer's rounds in a logging step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from megatron_muon.mcore.watching.rows import Message, dot, row_name
from megatron_muon.planning.rounds.table import RoundTable
from megatron_muon.rules.muon import MOMENTUM_KEY, DistributedMuon, Muon
from megatron_muon.runtime.exchange.messages import Staged
from megatron_muon.runtime.rule import Shards, cut_into_slices


class MatrixObserver:
    """Adds what it sees of Muon's matrices to a message. It keeps nothing that is in
    use.
    """

    def __init__(self, muon: DistributedMuon, message: Message) -> None:
        self._matrices = muon.plan.matrices
        assert isinstance(muon.rule, Muon)
        self._scales = muon.rule.scales
        self._message = message
        self._rows = [row_name(matrix.name) for matrix in self._matrices]

    def before_home(self, staged: Staged) -> None:
        """Count the matrices at home here, and those with a gradient."""
        indices = chain.from_iterable(stack.matrices for stack in staged.stacks)
        for index, moves in zip(indices, staged.moves, strict=True):
            numel = self._matrices[index].numel
            self._add(
                index,
                matrices=1,
                home_elements=numel,
                moved=moves,
                moved_elements=moves * numel,
            )

    def before_update(
        self, table: RoundTable, shards: Shards, directions: Sequence[Tensor]
    ) -> None:
        """Sums over the elements that are held here."""
        here = [shards[index] for index, _ in table.parameters]
        weights = cut_into_slices([shard.main_param for shard in here], table)
        momenta = cut_into_slices([shard.state(MOMENTUM_KEY) for shard in here], table)
        grads = cut_into_slices([shard.grad for shard in here], table)
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
