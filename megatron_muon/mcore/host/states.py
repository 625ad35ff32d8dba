"""States that Transformer Engine's FusedAdam holds in fewer bytes:
use_precision_aware_optimizer.

Megatron then gives the optimizer slices of the model's weights themselves, with
gradients under another name and in any dtype. FusedAdam has the main parameters among
its states: whole, or the 16 bits that a bf16 weight lacks. Muon's momentum and main
parameters are held by the same Python, with the same scales; Muon writes weight and
main parameter, as FusedAdam does for AdamW's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.states import MAIN_KEY, States, of_halves, write_halves

# These count the steps of each parameter.
TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_MOST_IN_FP8 = 448.0  # e4m3
MASTER_KEY, SECOND_KEY = "master_param", "exp_avg_sq"


def adam_holds_main(config: Any) -> bool:
    """Whether FusedAdam holds the main parameters: not with fp8 by most recipes, since
    core 0.13.
    """
    on = bool(config.use_precision_aware_optimizer)
    return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", on))


def try_states(config: Any, device: torch.device) -> None:
    """Have Megatron's Adam hold one element in the config's dtypes; a RuntimeError says
    why it cannot.
    """
    adam = mcore_optimizer.Adam
    if not hasattr(adam, "set_scaled_state"):
        name = f"{adam.__module__}.{adam.__name__}"
        raise RuntimeError(
            f"Megatron has picked {name}, which holds states in fp32 alone"
        )
    adam(
        [Parameter(torch.zeros(1, dtype=torch.bfloat16, device=device))],
        master_weights=True,
        master_weight_dtype=config.main_params_dtype,
        exp_avg_dtype=config.exp_avg_dtype,
        exp_avg_sq_dtype=config.exp_avg_sq_dtype,
    )


class OfFusedAdam(States):
    """Moments in other dtypes, with FusedAdam's scales; shards are fp32 main
    parameters.
    """

    are_copies = True

    def get(self, shard: Tensor, key: str) -> Tensor:
        if key == MAIN_KEY:
            return shard.detach()
        wide: Tensor = self._optimizer.get_unscaled_state(shard, key)
        return wide

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        dtype = (
            torch.float32 if key == MAIN_KEY else self._optimizer.name_to_dtype_map[key]
        )
        if dtype == torch.float32:
            super().put(shard, key, wide)
        elif dtype == torch.uint8:
            # FusedAdam would divide zeros by zero. Muon's scale is rounded, so
            # that a load of what was saved finds the same one: the largest element is
            # 448 by both.
            state = self._optimizer.state[shard]
            scale = _MOST_IN_FP8 / wide.abs().amax()
            if SECOND_KEY not in state:
                scale = scale.bfloat16().float()
            state[key]._quantizer.scale.copy_(torch.where(scale.isfinite(), scale, 1.0))
            state[key].copy_(wide)
        else:
            self._optimizer.set_scaled_state(shard, key, wide)

    def start_state(self, shard: Tensor, keys: Sequence[str]) -> None:
        if self._optimizer.state[shard]:
            return
        self.start(shard)
        state = self._optimizer.state[shard]
        if SECOND_KEY not in keys:
            del state[SECOND_KEY]
        if shard.dtype == torch.float32:
            state.pop(MASTER_KEY, None)

    def start(self, shard: Tensor) -> None:
        """Give a shard without state the state of AdamW before its first step.

        Megatron's call lacks an argument that FusedAdam has since it keeps remainders.
        """
        if self._optimizer.state[shard]:
            return
        initialize = self._optimizer.initialize_state
        if len(inspect.signature(initialize).parameters) == 1:
            initialize(shard)
            return
        keeps = getattr(self._optimizer, "store_param_remainders", False)
        initialize(shard, bool(keeps) and shard.dtype == torch.bfloat16)


class OfWeights(OfFusedAdam):
    """Shards are slices of the model's weights, and FusedAdam has their main
    parameters.

    An fp32 weight is its own main parameter. (FusedAdam makes a copy, which it never
    updates.)
    """

    def grad(self, shard: Tensor) -> Tensor | None:
        grad: Tensor | None = getattr(shard, "decoupled_grad", None)
        return grad

    def set_grad(self, shard: Tensor, grad: Tensor | None) -> None:
        shard.decoupled_grad = grad  # type: ignore[attr-defined]

    def get(self, shard: Tensor, key: str) -> Tensor:
        if key != MAIN_KEY or shard.dtype == torch.float32:
            return super().get(shard, key)
        master = self._optimizer.state[shard].get(MASTER_KEY)
        if master is None:  # before a first step
            return shard.detach().to(torch.float32, copy=True)
        if master.dtype == torch.int16:  # which may be on the host
            return of_halves(shard.detach().to(master.device), master)
        return super().get(shard, MASTER_KEY)

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        if key != MAIN_KEY or shard.dtype == torch.float32:
            super().put(shard, key, wide)
            return
        master = self._optimizer.state[shard].get(MASTER_KEY)
        if master is not None and master.dtype == torch.int16:
            write_halves(wide.to(master.device), shard.detach(), master)
            return
        shard.detach().copy_(wide)
        if master is not None:  # else it is before a first step
            super().put(shard, MASTER_KEY, wide)

    def reset_main(self, shard: Tensor) -> None:
        """Take the main parameter from the weight, which was loaded; if there is one
        yet.
        """
        if MASTER_KEY in self._optimizer.state[shard]:
            self.put(shard, MAIN_KEY, shard.detach().to(torch.float32, copy=True))


def init_state_of(
    init_adam_state: Callable[..., None], states: States, muon: DistributedMuon | None
) -> Callable[..., None]:
    """Megatron's ``init_state_fn``, which gives Muon's shards a momentum and no second
    moment.
    """
    if states.adamw_is_last:  # HybridDeviceOptimizer's
        return lambda optimizer, config=None: optimizer.dummy_step()

    def init_state(optimizer: Any, config: Any = None) -> None:
        if muon is not None:
            for shard in muon.main_params.values():
                states.start_state(shard, muon.rule.state_keys)
        if isinstance(states, OfFusedAdam):
            for group in optimizer.param_groups:
                for shard in group["params"]:
                    states.start(shard)
        init_adam_state(optimizer, config)  # passes over parameters that have state
        if isinstance(optimizer, TORCH_ADAMS):
            for state in optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))

    return init_state
