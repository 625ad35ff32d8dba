"""The optimizers' kernels of Transformer Engine and Apex, in torch: fp32 arithmetic, in
place.

After the formulas of ``common/multi_tensor/adam.cu``, in the order in which it rounds.
``lists`` are lists of tensors of equal length: gradients, parameters, first and second
moments, then what the variant adds. ``chunk`` and ``noop`` are for the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _step(
    grad: Tensor,
    param: Tensor,
    first: Tensor,
    second: Tensor,
    master: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    correct: int,
    decay: float,
) -> None:
    """One parameter's; ``mode`` 0 adds the decay to the gradient, 1 to the update."""
    wide = (param if master is None else master).float()
    grad = grad.float()
    if mode == 0 and decay:
        grad = grad + decay * wide
    m = beta1 * first.float() + (1 - beta1) * grad
    v = beta2 * second.float() + (1 - beta2) * grad * grad
    m_hat = m / (1 - beta1**step) if correct else m
    v_hat = v / (1 - beta2**step) if correct else v
    update = m_hat / (v_hat.sqrt() + eps)
    if mode == 1 and decay:
        update = update + decay * wide
    wide = wide - lr * update
    for target, value in ((first, m), (second, v), (param, wide), (master, wide)):
        if target is not None:
            target.copy_(value)


def multi_tensor_adam(chunk: int, noop: Tensor, lists: Any, *numbers: Any) -> None:
    """Plain; a fifth list are fp32 master weights."""
    for grad, param, first, second, *master in zip(*lists, strict=True):
        _step(grad, param, first, second, master[0] if master else None, *numbers)


def master_of(param: Tensor, low: Tensor) -> Tensor:
    """The fp32 number of a bf16 weight and its lower 16 bits. The kernel's own words: a
    negative remainder says that the weight was rounded up.
    """
    high = param.view(torch.int16).int() - (low < 0).int()
    return ((high << 16) | (low.int() & 0xFFFF)).view(torch.float32)


def multi_tensor_adam_param_remainder(
    chunk: int, noop: Tensor, lists: Any, *numbers: Any
) -> None:
    """bf16 weights; a fifth list has the lower 16 bits of their fp32 masters, as
    int16.
    """
    for grad, param, first, second, low in zip(*lists, strict=True):
        master = master_of(param, low)
        _step(grad, param, first, second, master, *numbers)
        bits = master.view(torch.int32)
        low.copy_((bits << 16) >> 16)
        param.view(torch.int16).copy_((bits >> 16) + (low < 0).int())


def multi_tensor_scale(chunk: int, noop: Tensor, lists: Any, scale: Any) -> None:
    """Second list = first list × scale; ``noop`` is 1 if a value is not finite."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)
        if not torch.isfinite(target).all():
            noop.fill_(1)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: Any, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all, and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)
