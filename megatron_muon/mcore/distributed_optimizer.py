"""Megatron's DistributedOptimizer with Muon inside: two classes that built objects are turned into.

Megatron builds its optimizer around Adam as it always does; then the inner Adam's class becomes a
subclass whose ``step`` is Muon's, and the DistributedOptimizer's one that checks gradients first.
No constructor of Megatron is copied, and whichever fused Adam it picked stays in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.agreement import raise_together
from megatron_muon.mcore.routing import named_parameters
from megatron_muon.optimizer import MOMENTUM_KEY, DistributedMuon


class MuonDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """A DistributedOptimizer whose inner optimizer is Muon for matrices and AdamW for the rest.

    Attributes:
        muon: the Muon part; None on a rank without trainable parameters.
    """

    muon: DistributedMuon | None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Check all gradients of the world, then step.

        Raises:
            FloatingPointError: a gradient here is missing or not finite. Nothing has changed yet.
            RuntimeError: one is on another rank.
        """
        device = next(self.model_chunks[0].parameters()).device
        group = self.get_grad_stats_parallel_group()
        raise_together(self._gradient_error(), group, device)
        return bool(super().step_with_ready_grads())

    def _gradient_error(self) -> FloatingPointError | None:
        shards = [] if self.is_stub_optimizer else self.get_parameters()
        grads = [shard.grad for shard in shards if shard.grad is not None]
        missing = any(self.muon.owns(s) and s.grad is None for s in shards) if self.muon else False
        if not missing and _all_finite(grads):
            return None
        names = [self._name(s) for s in shards if s.grad is None or not _all_finite([s.grad])]
        return FloatingPointError(
            f"gradients are missing, NaN or Inf in {', '.join(names[:5])}"
            f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}; no optimizer state or "
            "parameter has been changed"
        )

    def _name(self, shard: torch.Tensor) -> str:
        names = {param: name for name, param in named_parameters(self.model_chunks)}
        for models, mains in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for model_group, main_group in zip(models, mains, strict=True):
                for param, main in zip(model_group, main_group, strict=True):
                    if main is shard:
                        return names[param]
        raise AssertionError("a shard of no parameter")

    def sharded_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def get_parameter_state_dp_zero(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def load_parameter_state(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()


def muon_over(adam: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The subclass of a (fused) Adam class whose ``step`` is Muon's and leaves Adam the rest."""

    class MuonOverAdam(adam):  # type: ignore[misc,valid-type]
        muon: DistributedMuon

        @torch.no_grad()
        def step(self, closure: None = None, **kwargs: Any) -> None:
            if closure is not None:
                raise TypeError("Muon takes no closure: Megatron's gradients are ready")

            def step_adamw() -> None:
                with _hidden_grads(self.muon.main_params.values()):
                    super(MuonOverAdam, self).step(**kwargs)

            self.muon.step(self.param_groups, self.state, step_adamw)

    MuonOverAdam.__name__ = f"MuonOver{adam.__name__}"
    return MuonOverAdam


@contextmanager
def _hidden_grads(shards: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it the shards have no gradient, so that Adam passes over them."""
    grads = [(shard, shard.grad) for shard in shards]
    for shard, _ in grads:
        shard.grad = None
    try:
        yield
    finally:
        for shard, grad in grads:
            shard.grad = grad


def init_state_of(
    init_adam_state: Callable[..., None], muon: DistributedMuon
) -> Callable[..., None]:
    """Megatron's ``init_state_fn``, with a momentum and no second moment for Muon's shards."""

    def init_state(optimizer: Any, config: Any = None) -> None:
        init_momentum(optimizer, muon)
        init_adam_state(optimizer, config)  # passes over parameters that have state

    return init_state


def init_momentum(optimizer: Any, muon: DistributedMuon) -> None:
    """Zero momentum for each Muon shard that has none: known before the first step."""
    for shard in muon.main_params.values():
        if not optimizer.state[shard]:
            optimizer.state[shard][MOMENTUM_KEY] = torch.zeros_like(shard, dtype=torch.float32)


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    if not tensors:
        return True
    largest = torch._foreach_norm(tensors, ord=float("inf"))
    return bool(torch.stack(largest).isfinite().all())


def _no_checkpoint() -> NoReturn:
    raise NotImplementedError(
        "optimizer='muon' cannot save or load its optimizer state yet: pass --no-save-optim and "
        "--no-load-optim, or choose optimizer='adam'"
    )
