"""One loss scale for all optimizers of a model.

Megatron gives each DistributedOptimizer a dynamic scaler of its own. It multiplies the loss by the
dense scale and divides each gradient by the scale of its optimizer. So an overflow in experts alone
lowers only the experts' scale. Then the loss is multiplied by one number and experts' gradients are
divided by another. The dense scale, which caused the overflow, never goes down
(megatron/core/optimizer/optimizer.py, ChainedOptimizer.get_loss_scale and prepare_grads).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class SharedGradScaler:
    """A Megatron gradient scaler that several optimizers share.

    Its scale changes once all of them have said whether they found an overflow, so that all divide
    a step's gradients by the same number.

    Args:
        scaler: Megatron's DynamicGradScaler.
        optimizers: number of optimizers that share it.
    """

    def __init__(self, scaler: Any, optimizers: int) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
        self._overflows: list[bool] = []

    @property
    def scale(self) -> torch.Tensor:
        """The factor of the loss, ``(1,)`` fp32."""
        return self._scaler.scale  # type: ignore[no-any-return]

    @property
    def inv_scale(self) -> torch.Tensor:
        """The factor that undoes it in gradients, ``(1,)`` fp32."""
        return self._scaler.inv_scale  # type: ignore[no-any-return]

    def update(self, found_inf: bool) -> None:
        """Note whether one optimizer found an overflow; the last one's call updates the scale."""
        self._overflows.append(found_inf)
        if len(self._overflows) == self._optimizers:
            self._scaler.update(any(self._overflows))
            self._overflows.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state of Megatron's scaler."""
        return self._scaler.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scaler's state; optimizers that share the scaler load the same state."""
        self._scaler.load_state_dict(state_dict)


def share_loss_scale(dist_opts: Sequence[Any]) -> None:
    """Give all optimizers of a model, as Megatron built them, the scaler of the first, if any."""
    scaler = dist_opts[0].grad_scaler
    if scaler is None:
        return
    shared = SharedGradScaler(scaler, len(dist_opts))
    for dist_opt in dist_opts:
        dist_opt.grad_scaler = shared
