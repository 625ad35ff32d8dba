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

from megatron_muon.agreement import raise_quoting
from megatron_muon.collectives import any_rank
from megatron_muon.mcore.weights import expert_name, weights
from megatron_muon.optimizer import MOMENTUM_KEY, DistributedMuon


class MuonDistributedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """A DistributedOptimizer whose inner optimizer is Muon for matrices and AdamW for the rest.

    Attributes:
        muon: the Muon part; None where Megatron made a stub, since nothing trains anywhere.
        ep_rank, local_experts: which experts this rank has, for messages.
    """

    muon: DistributedMuon | None
    ep_rank: int = 0
    local_experts: int = 0

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Megatron's: copy, unscale, check for overflow; then check what it leaves unchecked.

        All optimizers of a run prepare before any of them steps, so an error leaves everything as
        it was. With a loss scaler Megatron skips the step on every rank instead.

        Returns:
            True where the loss scaler found an overflow.

        Raises:
            FloatingPointError: a gradient here is missing or not finite.
            RuntimeError: one is on another rank.
        """
        overflow = bool(super().prepare_grads())
        group = self.get_grad_stats_parallel_group()
        if not self.grad_scaler and any_rank("muon/vote", self._some_grad_is_unusable(), group):
            raise_quoting(self._gradient_error(), group)
        return overflow

    def _some_grad_is_unusable(self) -> torch.Tensor:
        """A bool scalar; on CUDA it is still being computed when this returns."""
        device = device_of(self.model_chunks)
        grads = [shard.grad for shard in self._shards()]
        if any(grad is None for grad in grads):
            return torch.tensor(True, device=device)
        return _not_finite([grad for grad in grads if grad is not None], device)

    def _gradient_error(self) -> FloatingPointError | None:
        names = {
            weight.param: expert_name(weight.name, self.ep_rank, self.local_experts)
            for weight in weights(self.model_chunks)
        }
        bad = [
            names[param]
            for param, shard in ([] if self.is_stub_optimizer else owned_shards(self))
            if shard.grad is None or _not_finite([shard.grad], shard.device)
        ]
        if not bad:
            return None
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        return FloatingPointError(
            f"gradients are missing, NaN or Inf in {', '.join(bad[:5])}{more}; no optimizer state "
            "or parameter has been changed"
        )

    def _shards(self) -> list[torch.Tensor]:
        return [] if self.is_stub_optimizer else list(self.get_parameters())

    def state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def load_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def sharded_state_dict(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def get_parameter_state_dp_zero(self, *args: object, **kwargs: object) -> NoReturn:
        """Not yet: see ``_no_checkpoint``."""
        _no_checkpoint()

    def load_parameter_state_from_dp_zero(self, *args: object, **kwargs: object) -> NoReturn:
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


def owned_shards(dist_opt: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """``(parameter, flat fp32 shard)`` for all that this rank holds a piece of.

    The shard is a copy for a bf16 parameter and a view of an fp32 one. Paired as Megatron fills the
    groups: ``model_param_group_index_map`` misnumbers groups that mix both.
    """
    for models, shards in (
        (dist_opt.model_float16_groups, dist_opt.shard_fp32_from_float16_groups),
        (dist_opt.model_fp32_groups, dist_opt.shard_fp32_groups),
    ):
        for model_group, shard_group in zip(models, shards, strict=True):
            yield from zip(model_group, shard_group, strict=True)


def device_of(model_chunks: Iterable[torch.nn.Module]) -> torch.device:
    """Where the rank's tensors are; known on a stage without any parameter, too."""
    for chunk in model_chunks:
        for param in chunk.parameters():
            return torch.device(param.device)
    return torch.device(torch.cuda.current_device())


def _not_finite(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not tensors:
        return torch.tensor(False, device=device)
    largest = torch._foreach_norm(tensors, ord=float("inf"))
    return torch.stack(largest).isfinite().all().logical_not()


def _no_checkpoint() -> NoReturn:
    raise NotImplementedError(
        "optimizer='muon' cannot save or load its optimizer state yet: save and load the model "
        "without the optimizer (in Megatron-LM --no-save-optim, --no-load-optim), or choose "
        "optimizer='adam'"
    )
