"""Megatron's chain of optimizers, dense and experts', which checks gradients before a
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_muon.console import first_names
from megatron_muon.mcore.checkpoint.chain import CheckpointChain
from megatron_muon.mcore.host.shards import owned_shards, parts_of
from megatron_muon.mcore.wiring.buffers.bucket_groups import finish_gathers
from megatron_muon.mcore.wiring.gradients import (
    LateNorm,
    require_usable_groups,
    shard_names,
)
from megatron_muon.mcore.wiring.nonfinite import NonfiniteReport
from megatron_muon.runtime.collectives import any_rank, marked
from megatron_muon.runtime.consensus import attempt, raise_quoting, raise_together

if TYPE_CHECKING:
    from megatron_muon.mcore.watching.watch import Watch
    from megatron_muon.mcore.wiring.radii import RunRadii

_LARGEST = torch.finfo(torch.float32).max


class MuonChainedOptimizer(CheckpointChain):
    """A ChainedOptimizer of MuonDistributedOptimizers."""

    _late_norm: LateNorm | None = None
    # where this rank has an optimizer with Muon
    nonfinite: NonfiniteReport | None = None
    watch: Watch | None = None  # with ``log_interval`` only
    radii: RunRadii | None = None  # with the rule hyperball only
    _skips = False  # the step under way, by its norm

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Megatron's; True where a gradient is not finite, and then the step is
        skipped.

        Raises:
            ValueError, RuntimeError: with a loss scaler, as ``get_grad_norm`` does
                without.
        """
        self._skips = False
        error = self._refusal()
        first = self.chained_optimizers[0]
        if first.grad_scaler:
            first.grad_scaler.begin()
        is_skipped = bool(super().prepare_grads())
        if is_skipped:  # on every rank, by a loss scaler's vote or by a refusal in it
            group = first.get_grad_stats_parallel_group()
            raise_together(error, group, self._device)
        if is_skipped and self.watch is not None:
            self.watch.skip()
        return is_skipped

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Megatron's step of each optimizer; every ``log_interval`` steps it is
        watched.

        Returns:
            False, with nothing changed, where the norm was above
            ``grad_norm_skip_threshold``.

        Raises:
            FloatingPointError: see ``NonfiniteReport.after_step``.
            ValueError: see ``refuse_step`` and ``require_usable_groups``.
            RuntimeError: see ``require_whole``.
        """
        if self._skips:
            return False
        if self.lacks_state:
            self.refuse_step()
        error = self._refusal()
        # in a loop that asks for no norm, or leaves it on the GPU
        if error is not None:
            self._late_norm = None  # of a step that is not taken
            raise error
        if self.nonfinite is not None:
            self.nonfinite.before_step()
        if self.radii is not None:  # of master weights
            self.radii.use()  # which may refuse the first step
        self.is_new = False
        with nullcontext() if self.watch is None else self.watch.step():
            self.half_stepped = True  # stays so after an error
            is_successful = bool(super().step_with_ready_grads())
            self.half_stepped = False
        if self.nonfinite is not None:
            self.nonfinite.after_step()
        return is_successful

    def numbers(self) -> dict[str, float]:
        """``megatron_muon.numbers``."""
        return {} if self.watch is None else self.watch.numbers()

    def wait_for_params(self) -> None:
        """Gather the parameters that a step has updated elsewhere, and wait for what is
        under way.

        With ``overlap_param_gather`` the next forward pass does so. Call it on every
        rank before anything else reads, copies or frees parameters. Without, or twice,
        it does nothing.
        """
        if getattr(self.config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            if all(part.is_staged for part in self.chained_optimizers):
                return
            # into gradients, which the step has used
            self.prepare_model_params_for_param_sync()
        for part in self.chained_optimizers:
            finish_gathers(part.model_chunks)

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Megatron's norm, reduced over all ranks; raises where a gradient cannot be
        used.

        The norm is finite only if every gradient is there, finite and far below the
        largest that momentum can take. (``norm_grads`` puts all of them in; with
        ``clip_scope`` "adamw" Muon's need only be finite.) A rank that refuses the step
        makes it NaN. So a finite norm needs no further reduction. No optimizer has
        stepped yet: an error leaves everything as it was. With a loss scaler Megatron
        has already skipped such a step, on every rank.

        From core 0.19 on, with Transformer Engine, Megatron leaves the norm on the GPU
        and the host does not wait for it. Then the next step raises, or a save before
        it.

        Returns:
            A float, or a scalar on the device.

        Raises:
            FloatingPointError: a gradient of this rank is missing, not finite, or so
                large that momentum would overflow; or the norm overflows, and the clip
                would make every gradient zero; or the step before had an unusable
                gradient.
            ValueError: see ``require_usable_groups``.
            RuntimeError: see ``require_whole``; or only another rank has an error.
        """
        self.require_usable_step()
        refusal = self._refusal()
        first = self.chained_optimizers[0]
        group = first.get_grad_stats_parallel_group()
        with marked("grads/norm", group):
            norm = super().get_grad_norm()
        # since core 0.19
        threshold = getattr(first.config, "grad_norm_skip_threshold", math.inf)
        if math.isfinite(threshold):
            self._skips = self._all_skip(bool(norm > threshold))
        elif isinstance(norm, Tensor) and not first.grad_scaler:
            self._late_norm = LateNorm(norm)
            return norm
        if first.grad_scaler:
            return norm
        # without a shared group each rank may know only a part of the norm
        is_everyones = self.grads_states_parallel_group_is_shared()
        votes = not (math.isfinite(norm) and is_everyones)
        if votes and any_rank("muon/vote", self._some_grad_is_unusable(), group):
            error, failure = attempt(self._gradient_error)
            raise_quoting(refusal or failure or error, group)
        clips = is_everyones and first.config.clip_grad > 0.0
        if math.isinf(norm) and clips and not self._skips:
            raise FloatingPointError(
                "every gradient is finite, but their norm is Inf, so clip_grad would "
                "make all of them zero; no optimizer state or parameter has been "
                "changed: resume from an earlier checkpoint, with a lower learning rate"
            )
        return norm

    def require_usable_step(self) -> None:
        """Raise on every rank if a norm still being computed in the step before is not
        finite.
        """
        late, self._late_norm = self._late_norm, None
        if late is not None:
            late.require_finite()

    def state_dict(self) -> Any:
        """Megatron's state dict; refused after a step with unusable gradients."""
        self.require_usable_step()
        return super().state_dict()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's state dict; refused after a step with unusable gradients."""
        self.require_usable_step()
        return super().sharded_state_dict(*args, **kwargs)

    def _all_skip(self, skips: bool) -> bool:
        """Whether every rank skips the step under way; Megatron lets each rank decide.

        A rank that holds no shard whose gradient is clipped would step, and wait for
        the others. Optimizers of several groups or instances may know other norms.
        """
        first = self.chained_optimizers[0]
        instances = first.ddp_config.num_distributed_optimizer_instances
        if instances > 1 or not self.grads_states_parallel_group_is_shared():
            vote = torch.tensor(skips, device=self._device)
            skips = any_rank("muon/vote", vote, self.voters)
        if skips and self.watch is not None:
            self.watch.skip()
        return skips

    def _refusal(self) -> Exception | None:
        """The reason why this rank cannot step; its optimizers carry it into the norm
        or a vote.
        """
        refusal = None
        try:
            loaded = any(part.half_loaded for part in self.chained_optimizers)
            if self.half_stepped or loaded:
                self.require_whole()
            for part in parts_of(self):
                require_usable_groups(part)
            if self.radii is not None:
                self.radii.require_no_decay()
        except (ValueError, RuntimeError) as error:
            refusal = error
        for part in self.chained_optimizers:
            part.refuses = refusal is not None
        return refusal

    def _grads(self) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
        """Each shard of this rank, with its optimizer and its gradient."""
        for part in parts_of(self):
            for _, shard in owned_shards(part):
                yield part, shard, part.states.grad(shard)

    def _some_grad_is_unusable(self) -> Tensor:
        """A bool scalar; on CUDA it is still being computed when this returns."""
        device = self._device
        if any(part.refuses for part in self.chained_optimizers):
            return torch.tensor(True, device=device)
        grads_of: dict[float, list[Tensor]] = {}
        for part, shard, grad in self._grads():
            if grad is None:
                return torch.tensor(True, device=device)
            grads_of.setdefault(_limit(part, shard), []).append(grad)
        if not grads_of:
            return torch.tensor(False, device=device)
        votes = [_beyond(grads, limit, device) for limit, grads in grads_of.items()]
        return torch.stack(votes).any()

    def _gradient_error(self) -> FloatingPointError | None:
        limits: dict[str, float] = {}  # of the shards whose gradient cannot be used
        for part, shard, grad in self._grads():
            limit = _limit(part, shard)
            if grad is None or _beyond([grad], limit, shard.device):
                limits[shard_names(part)[id(shard)]] = limit
        if not limits:
            return None
        lowest = min(limits.values())
        beyond = ""
        if lowest < _LARGEST:
            beyond = f", or beyond ±{lowest:.1e}, which momentum adds up to Inf"
            beyond += " (set clip_grad)"
        return FloatingPointError(
            f"gradients are missing, NaN or Inf{beyond} in "
            f"{first_names(list(limits), 5)}; no optimizer state or parameter has been "
            "changed"
        )


def _limit(part: Any, shard: Tensor) -> float:
    """The largest gradient that leaves the momentum finite.

    Momentum grows to at most 1 / (1 - μ) × the largest gradient, and travels in bf16.
    Clipping, which comes later, makes gradients small enough, so with it they need only
    be finite.
    """
    if not part.muon.owns(shard):
        return _LARGEST
    if part.config.clip_grad > 0.0 and part.muon.config.clip_scope == "all":
        return _LARGEST
    settings = {matrix.own for matrix in part.muon.plan.matrices}
    numerics = part.muon.numerics
    momentum: float = max(numerics.where(own).config.momentum for own in settings)
    return torch.finfo(torch.bfloat16).max * (1.0 - momentum) * 0.999


def _beyond(tensors: list[Tensor], limit: float, device: torch.device) -> Tensor:
    """Whether an element is NaN or its absolute value above ``limit``."""
    ends: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel():
            ends += torch.aminmax(tensor)
    if not ends:
        return torch.tensor(False, device=device)
    return (torch.stack(ends).abs() <= limit).all().logical_not()
