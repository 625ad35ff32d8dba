"""A rule that is not Muon and uses all that the engine offers, and a run with it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_muon.runtime.rule import (
    PhaseNames,
    RoundRule,
    Rule,
    Shard,
    cut_into_slices,
)
from megatron_muon.runtime.states import MAIN_KEY

KEY = "exp_avg"


class Centred(Rule):
    """Gradients over their matrix's norm, less each row's mean; weights keep their
    matrix's norm.

    Its state adds gradients up. ``shared`` matrices are not made for it.
    """

    names = PhaseNames("centred/before", "centred/home", "centred/after")
    state_keys = (KEY,)
    asks_before = True
    asks_after = True

    def __init__(self, *of_muon: Any) -> None: ...

    def of_round(self, table: Any, sharers: Any) -> CentredRound:
        return CentredRound(table)


class CentredRound(RoundRule):
    def __init__(self, table: Any) -> None:
        self._table = table

    def before_gather(
        self,
        shards: Sequence[Shard],
        into: Sequence[Tensor | None],
        moves: Tensor,
        sums: Tensor | None,
    ) -> None:
        assert sums is not None
        grads = cut_into_slices([each.grad for each in shards], self._table)
        for target, grad, square in zip(into, grads, sums[:, 1], strict=True):
            if target is not None:
                target.copy_(grad / square.sqrt())
        for each in shards:
            each.put(KEY, each.state(KEY).add_(each.grad))
        moves.fill_(1.0)

    def at_home(self, staged: Any) -> Any:
        for stack in staged.stacks:
            layout = stack.layout
            count = len(stack.matrices)
            flat = staged.elements[stack.start : stack.start + count * layout.numel]
            parts = flat.view(count, layout.column_parts, layout.rows, -1)
            parts.sub_(parts.mean(dim=(1, 3), keepdim=True))
        homes = sum(len(stack.matrices) for stack in staged.stacks)
        return SimpleNamespace(norms=[torch.ones(homes)], lines=[torch.ones(homes)])

    def after_scatter(self, shards: Sequence[Shard], results: list[Tensor]) -> None:
        params = [each.main_param for each in shards]
        slices = cut_into_slices(params, self._table)
        cut = zip(shards, self._table.parameters, strict=True)
        rates = [each.lr for each, (_, sizes) in cut for _ in sizes]
        for weight, result, lr in zip(slices, results, rates, strict=True):
            weight.sub_(result.float(), alpha=lr)
        _put(shards, params)

    def numbers_before(self, shards: Sequence[Shard]) -> Tensor:
        squares = self._squares([each.grad for each in shards])
        return torch.stack([torch.zeros_like(squares), squares], dim=1)

    def numbers_after(self, shards: Sequence[Shard]) -> Tensor:
        return self._squares([each.main_param for each in shards])

    def finish(self, shards: Sequence[Shard], sums: Tensor) -> None:
        params = [each.main_param for each in shards]
        for weight, square in zip(
            cut_into_slices(params, self._table), sums, strict=True
        ):
            weight.div_(square.sqrt())
        _put(shards, params)

    def _squares(self, wholes: Sequence[Tensor]) -> Tensor:
        squares = [
            piece.double().square().sum()
            for piece in cut_into_slices(wholes, self._table)
        ]
        return torch.stack(squares).float() if squares else torch.zeros(0)


def _put(shards: Sequence[Shard], params: Sequence[Tensor]) -> None:
    for each, param in zip(shards, params, strict=True):
        each.put(MAIN_KEY, param)
