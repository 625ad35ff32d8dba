"""Megatron's chain of optimizers, dense and experts', which checks gradients before any steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_muon.agreement import attempt, raise_quoting
from megatron_muon.collectives import any_rank
from megatron_muon.mcore.checkpoint_chain import CheckpointChain
from megatron_muon.mcore.shards import device_of, owned_shards
from megatron_muon.mcore.weights import expert_name, weights


class MuonChainedOptimizer(CheckpointChain):
    """A ChainedOptimizer of MuonDistributedOptimizers."""

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Megatron's: copy, unscale, check for overflow; then check what it leaves unchecked.

        No optimizer has stepped yet, so an error leaves everything as it was. With a loss scaler
        Megatron skips the step on every rank instead.

        Returns:
            True where the loss scaler found an overflow.

        Raises:
            FloatingPointError: a gradient here is missing or not finite.
            RuntimeError: one is on another rank.
        """
        overflow = bool(super().prepare_grads())
        first = self.chained_optimizers[0]
        group = first.get_grad_stats_parallel_group()
        if not first.grad_scaler and any_rank("muon/vote", self._some_grad_is_unusable(), group):
            error, failure = attempt(self._gradient_error)
            raise_quoting(failure or error, group)
        return overflow

    def _some_grad_is_unusable(self) -> torch.Tensor:
        """A bool scalar; on CUDA it is still being computed when this returns."""
        device = device_of(self.chained_optimizers[0].model_chunks)
        grads = [shard.grad for _, _, shard in self._owned()]
        if any(grad is None for grad in grads):
            return torch.tensor(True, device=device)
        return _not_finite([grad for grad in grads if grad is not None], device)

    def _gradient_error(self) -> FloatingPointError | None:
        chunks = [chunk for part in self.chained_optimizers for chunk in part.model_chunks]
        names = {weight.param: weight.name for weight in weights(chunks)}
        bad = [
            expert_name(names[param], part.ep_rank, part.local_experts)
            for part, param, shard in self._owned()
            if shard.grad is None or _not_finite([shard.grad], shard.device)
        ]
        if not bad:
            return None
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        return FloatingPointError(
            f"gradients are missing, NaN or Inf in {', '.join(bad[:5])}{more}; no optimizer state "
            "or parameter has been changed"
        )

    def _owned(self) -> Iterator[tuple[Any, torch.nn.Parameter, torch.Tensor]]:
        for part in self.chained_optimizers:
            if not part.is_stub_optimizer:
                for param, shard in owned_shards(part):
                    yield part, param, shard


def _not_finite(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.tensor(False, device=device)
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    return torch.stack(ends).isfinite().all().logical_not()
