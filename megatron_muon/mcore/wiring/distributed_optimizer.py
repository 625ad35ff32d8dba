"""Megatron's DistributedOptimizer with Muon inside: two subclasses for objects that it
has built.

Megatron builds its optimizer around Adam as it always does. Then each object's class
becomes a subclass: the inner Adam's has Muon's ``step``, the DistributedOptimizer's
saves and loads Muon's state (``checkpoint``), and their chain's checks gradients first
(``chained_optimizer``). No constructor of Megatron is copied, and the fused Adam that
it picked stays in use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_muon.mcore.checkpoint.buffers import RECORD
from megatron_muon.mcore.checkpoint.formats import MuonCheckpoint
from megatron_muon.mcore.host.shards import device_of, owned_shards
from megatron_muon.mcore.host.states import TORCH_ADAMS, OfWeights
from megatron_muon.mcore.wiring.gradients import norm_grads
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.collectives import naming
from megatron_muon.runtime.states import States

if TYPE_CHECKING:
    from megatron_muon.mcore.wiring.radii import RunRadii


class MuonDistributedOptimizer(MuonCheckpoint):
    """A DistributedOptimizer whose inner optimizer is Muon for matrices and AdamW for
    the rest.
    """

    radii: RunRadii | None = None  # with the rule hyperball only
    # this rank cannot step, as the norm or a loss scaler's vote says to all
    refuses = False
    # False from a step on, until mxfp8 parameters are in the buffer that is gathered
    is_staged = True

    def step_with_ready_grads(self) -> bool:
        """Megatron's step."""
        self.is_staged = self.is_stub_optimizer
        return bool(super().step_with_ready_grads())

    def _copy_main_params_to_param_buffer(self) -> None:
        """Megatron's copy of mxfp8 parameters into the memory of gradients."""
        super()._copy_main_params_to_param_buffer()
        self.is_staged = True

    def state_dict(self) -> Any:
        """Muon's state dict, with the radii of the rule hyperball."""
        state = super().state_dict()
        known = None if self.radii is None else self.radii.known
        if known is not None and RECORD in state:  # another optimizer's has none
            state[RECORD]["radii"] = known
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Load Muon's state, with the radii of the rule hyperball."""
        if self.radii is not None:  # before anything is loaded
            saved = state_dict.get(RECORD, {}).get("radii")
            self.radii.require_usable(saved)
        super().load_state_dict(state_dict)
        if self.radii is not None:
            self.radii.load(saved)

    def _copy_model_params_to_main_params(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's copy after a load of the model, and Muon's of its own copies."""
        super()._copy_model_params_to_main_params(*args, **kwargs)
        if isinstance(self.states, OfWeights):
            for _, shard in owned_shards(self):
                self.states.reset_main(shard)

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """The main parameters whose gradients are in the norm and are clipped
        (``clip_scope``).
        """
        params: list[torch.nn.Parameter] = super().get_parameters()
        muon = self.muon  # None in a stub
        if muon is None or muon.config.clip_scope == "all":
            return params
        return [param for param in params if not muon.owns(param)]

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """The gradients of the norm, up to core 0.18; see ``norm_grads``."""
        return self._with_all(super().get_main_grads_for_grad_norm())

    def get_grads_for_grad_norm(
        self, grad_norm_group: str | None = None
    ) -> list[Tensor]:
        """The gradients of the norm, from core 0.19 on; see ``norm_grads``."""
        counted: list[Tensor] = super().get_grads_for_grad_norm(grad_norm_group)
        return counted if grad_norm_group is not None else self._with_all(counted)

    def _unscale_main_grads_and_check_for_nan(self) -> bool:
        """Megatron's, with a loss scale; raises PhaseError where a peer is lost."""
        group = self.get_grad_stats_parallel_group()
        what = "Megatron's vote on overflowed gradients"
        with naming("grads/found_inf", group, what):
            return bool(super()._unscale_main_grads_and_check_for_nan())

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        """Megatron's gradients, with a loss scale; with NaN beside them on a rank that
        refuses.
        """
        grads: list[Tensor] = super()._collect_main_grad_data_for_unscaling()
        if self.refuses:
            grads.append(
                torch.full((1,), math.nan, device=device_of(self.model_chunks))
            )
        return grads

    def _with_all(self, counted: list[Tensor]) -> list[Tensor]:
        if self.is_stub_optimizer or self.grad_scaler:
            return counted
        grads = [self.states.grad(shard) for _, shard in owned_shards(self)]
        if self.refuses:
            grads.append(None)
        return norm_grads(counted, grads, device_of(self.model_chunks))


class MuonStep(torch.optim.Optimizer):
    """Comes before a (fused) Adam class: its ``step`` does Muon's part and leaves Adam
    the rest.
    """

    muon: DistributedMuon
    states: States

    def start_muon(self, *, orthogonalizes: bool) -> None:
        """Begin Muon's part of a step while the last results of another one travel.

        Gradients are ready. With ``orthogonalizes`` the first round's work at home is
        done, too.
        """
        self.muon.start(self._groups(), self.states, works=orthogonalizes)

    @torch.no_grad()
    def step(self, closure: None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Update Muon's parameters and Adam's; Adam passes over shards without a
        gradient.
        """
        if closure is not None:
            raise TypeError("optimizer.step() does not accept a closure with Muon")
        shards = self.muon.main_params.values()

        def step_adamw() -> None:
            grads = [(shard, self.states.grad(shard)) for shard in shards]
            for shard, _ in grads:
                self.states.set_grad(shard, None)
            try:
                super(MuonStep, self).step(**kwargs)
            finally:
                for shard, grad in grads:
                    self.states.set_grad(shard, grad)

        self.muon.step(self._groups(), self.states, step_adamw)
        # Megatron wants one step number for all parameters
        if isinstance(self, TORCH_ADAMS):
            for shard in shards:
                state = self.state[shard]
                state["step"] = state.setdefault("step", torch.tensor(0.0)) + 1

    def load_state_dict(self, state_dict: Any) -> None:
        """Adam's; Muon forgets a step that failed."""
        self.muon.forget_step()
        self.states.load(super().load_state_dict, state_dict)

    def _groups(self) -> list[dict[str, Any]]:
        """The groups for Muon; with ``independent_decay`` lr cancels in their decay."""
        groups = self.param_groups
        if not self.muon.config.independent_decay:
            return groups
        peaks = [group["max_lr"] * group.get("lr_mult", 1.0) for group in groups]
        return [
            {**group, "weight_decay": group["weight_decay"] / (peak or 1.0)}
            for group, peak in zip(groups, peaks, strict=True)
        ]


def muon_over(adam: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of an Adam class with ``MuonStep``."""
    return type(f"MuonOver{adam.__name__}", (MuonStep, adam), {})
