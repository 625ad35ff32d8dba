"""A gradients' norm that is still being computed when the step that it belongs to goes on."""

from __future__ import annotations

import math
from typing import Any

import torch


class LateNorm:
    """Megatron's norm on its way to the host, which does not wait for it.

    Args:
        norm: one element, reduced over all ranks, so that all know the same.
    """

    def __init__(self, norm: torch.Tensor) -> None:
        self._event: Any = None
        if norm.device.type == "cpu":
            self._norm = norm.detach().clone()
            return
        self._norm = norm.detach().to("cpu", non_blocking=True)  # torch takes pinned memory for it
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def require_finite(self) -> None:
        """Raise where it was not.

        Raises:
            FloatingPointError: with the norm, and the way out.
        """
        if self._event is not None and not self._event.query():
            self._event.synchronize()  # not in a run, where a forward and a backward lie between
        value = float(self._norm)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the gradients' norm of the step before was {value}: gradients were missing, NaN, "
                "Inf or beyond 1e19. That step has changed parameters and optimizer state, which "
                "are not saved: go on from the last checkpoint. Megatron names the first bucket "
                "with such gradients, before a step, with --check-for-nan-in-loss-and-grad"
            )


def norm_grads(
    counted: list[torch.Tensor], shards: list[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """The gradients of Megatron's norm, which is NaN if one that it leaves out cannot be used.

    It leaves out what other ranks have, too: replicas on TP ranks, shared embeddings.

    Args:
        counted: the gradients that Megatron takes, each ``(n,)`` fp32.
        shards: all that this rank holds, with their gradients.
        device: theirs.

    Returns:
        ``counted``; one of them a copy, to which 0 or NaN is added.
    """
    there = {id(grad) for grad in counted}
    if any(shard.grad is None for shard in shards):
        unusable = torch.full((), math.nan, device=device)
    else:
        grads = [shard.grad for shard in shards]
        others = [g for g in grads if g is not None and g.numel() and id(g) not in there]
        if not others:
            return counted
        unusable = torch.stack(torch._foreach_norm(others, math.inf)).amax() * 0.0
    if not counted:
        return [unusable.view(1)]
    smallest = min(range(len(counted)), key=lambda at: counted[at].numel())
    replaced = list(counted)
    replaced[smallest] = counted[smallest] + unusable
    return replaced
