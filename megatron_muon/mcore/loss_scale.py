"""One loss scale for all optimizers of a model.

Megatron gives each DistributedOptimizer a dynamic scaler of its own, multiplies the loss by the
dense one's and divides every gradient by its own optimizer's. So an overflow in experts alone
lowers only the experts' scale: their gradients are then divided by another number than the loss was
multiplied by, and the dense scale, which overflows, never goes down
(megatron/core/optimizer/optimizer.py, ChainedOptimizer.get_loss_scale and prepare_grads).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

_of_chunk: weakref.WeakKeyDictionary[Any, SharedGradScaler] = weakref.WeakKeyDictionary()


class SharedGradScaler:
    """A Megatron gradient scaler that several optimizers have in common.

    Its scale changes once all of them have said whether they found an overflow, so that all divide
    a step's gradients by the same number.

    Args:
        scaler: Megatron's DynamicGradScaler.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._found: list[bool] = []
        self.optimizers = 1

    @property
    def scale(self) -> torch.Tensor:
        """What the loss is multiplied by, ``(1,)`` fp32."""
        return self._scaler.scale  # type: ignore[no-any-return]

    @property
    def inv_scale(self) -> torch.Tensor:
        """What gradients are multiplied by, ``(1,)`` fp32."""
        return self._scaler.inv_scale  # type: ignore[no-any-return]

    def update(self, found_inf: bool) -> None:
        """One optimizer's word; the last one's changes the scale."""
        self._found.append(found_inf)
        if len(self._found) == self.optimizers:
            self._scaler.update(any(self._found))
            self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """Megatron's."""
        return self._scaler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Megatron's; the optimizers that share it load the same."""
        self._scaler.load_state_dict(state_dict)


def share_loss_scale(dist_opt: Any, with_experts: bool) -> None:
    """Give an optimizer the scaler of the others of its model.

    Args:
        dist_opt: as Megatron built it. The dense one comes first.
        with_experts: it is the experts' one.
    """
    if dist_opt.grad_scaler is None:
        return
    if with_experts:
        shared = _of_chunk[dist_opt.model_chunks[0]]
        shared.optimizers += 1
    else:
        shared = SharedGradScaler(dist_opt.grad_scaler)
        for chunk in dist_opt.model_chunks:
            _of_chunk[chunk] = shared
    dist_opt.grad_scaler = shared
