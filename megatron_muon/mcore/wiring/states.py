"""States that Transformer Engine's FusedAdam holds in fewer bytes: use_precision_aware_optimizer.

Megatron then gives the optimizer slices of the model's weights themselves, with gradients under
another name and in any dtype. FusedAdam has the main parameters among its states: whole, or the
16 bits that a bf16 weight lacks. Muon's momentum and main parameters are held by the same Python,
with the same scales; Muon writes weight and main parameter, as FusedAdam does for AdamW's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_muon.runtime.exchange.host import HostMemory, Name
from megatron_muon.runtime.optimizer import DistributedMuon
from megatron_muon.runtime.states import (
    MAIN_KEY,
    MOMENTUM_KEY,
    States,
    of_halves,
    write_halves,
)

TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)  # they count the steps of each parameter
Tensor = torch.Tensor
_MOST_IN_FP8 = 448.0  # e4m3
_MASTER, _SECOND = "master_param", "exp_avg_sq"


def adam_holds_main(config: Any) -> bool:
    """Whether main parameters are FusedAdam's: not with fp8 by most recipes, since core 0.13."""
    on = bool(config.use_precision_aware_optimizer)
    return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", on))


def try_states(config: Any, device: torch.device) -> None:
    """Make the Adam that Megatron has picked hold one element as the config says.

    Raises:
        RuntimeError: it cannot; says why.
    """
    adam = mcore_optimizer.Adam
    if not hasattr(adam, "set_scaled_state"):
        name = f"{adam.__module__}.{adam.__name__}"
        raise RuntimeError(f"Megatron has picked {name}, which holds states in fp32 alone")
    adam(
        [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16, device=device))],
        master_weights=True,
        master_weight_dtype=config.main_params_dtype,
        exp_avg_dtype=config.exp_avg_dtype,
        exp_avg_sq_dtype=config.exp_avg_sq_dtype,
    )


def states_of(dist_opt: Any) -> States:
    """Those of a DistributedOptimizer that is no stub."""
    if not dist_opt.config.use_precision_aware_optimizer:
        return States(dist_opt.optimizer)
    if dist_opt.config.optimizer_cpu_offload:
        return OfHybrid(dist_opt.optimizer)
    kind = OfWeights if adam_holds_main(dist_opt.config) else OfFusedAdam
    return kind(dist_opt.optimizer)


class OfFusedAdam(States):
    """Moments in other dtypes, by FusedAdam's scales; main parameters are fp32 shards."""

    are_copies = True

    def get(self, shard: Tensor, key: str) -> Tensor:
        """See ``States``."""
        if key == MAIN_KEY:
            return shard.detach()
        wide: Tensor = self._optimizer.get_unscaled_state(shard, key)
        return wide

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        dtype = torch.float32 if key == MAIN_KEY else self._optimizer.name_to_dtype_map[key]
        if dtype == torch.float32:
            super().put(shard, key, wide)
        elif dtype == torch.uint8:
            # FusedAdam's own way divides zeros by zero. Muon's scale is rounded, so that a load
            # of what was saved finds the same one: the largest element is 448 by both.
            state, scale = self._optimizer.state[shard], _MOST_IN_FP8 / wide.abs().amax()
            if _SECOND not in state:
                scale = scale.bfloat16().float()
            state[key]._quantizer.scale.copy_(torch.where(scale.isfinite(), scale, 1.0))
            state[key].copy_(wide)
        else:
            self._optimizer.set_scaled_state(shard, key, wide)

    def start_momentum(self, shard: Tensor) -> None:
        """See ``States``."""
        if self._optimizer.state[shard]:
            return
        self.start(shard)
        del self._optimizer.state[shard][_SECOND]
        if shard.dtype == torch.float32:
            self._optimizer.state[shard].pop(_MASTER, None)

    def start(self, shard: Tensor) -> None:
        """Give a shard without state that of AdamW before its first step.

        Megatron's own call lacks an argument that FusedAdam has since it keeps remainders.
        """
        if self._optimizer.state[shard]:
            return
        keeps = getattr(self._optimizer, "store_param_remainders", None)
        takes = len(inspect.signature(self._optimizer.initialize_state).parameters) > 1
        given = (bool(keeps) and shard.dtype == torch.bfloat16,) if takes else ()
        self._optimizer.initialize_state(shard, *given)


class OfWeights(OfFusedAdam):
    """Shards are slices of the model's weights, and FusedAdam has their main parameters.

    An fp32 weight is its own main parameter. (FusedAdam makes a copy, which it never updates.)
    """

    def grad(self, shard: Tensor) -> Tensor | None:
        """See ``States``."""
        grad: Tensor | None = getattr(shard, "decoupled_grad", None)
        return grad

    def set_grad(self, shard: Tensor, grad: Tensor | None) -> None:
        """See ``States``."""
        shard.decoupled_grad = grad  # type: ignore[attr-defined]

    def get(self, shard: Tensor, key: str) -> Tensor:
        """See ``States``."""
        if key != MAIN_KEY or shard.dtype == torch.float32:
            return super().get(shard, key)
        master = self._optimizer.state[shard].get(_MASTER)
        if master is None:  # before a first step
            return shard.detach().to(torch.float32, copy=True)
        if master.dtype == torch.int16:
            return of_halves(shard.detach(), master)
        return super().get(shard, _MASTER)

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        if key != MAIN_KEY or shard.dtype == torch.float32:
            super().put(shard, key, wide)
            return
        master = self._optimizer.state[shard][_MASTER]
        if master.dtype == torch.int16:
            write_halves(wide, shard.detach(), master)
            return
        shard.detach().copy_(wide)
        super().put(shard, _MASTER, wide)

    def reset_main(self, shard: Tensor) -> None:
        """Take the main parameter from the weight, which was loaded; if there is one yet."""
        if _MASTER in self._optimizer.state[shard]:
            self.put(shard, MAIN_KEY, shard.detach().to(torch.float32, copy=True))


class HybridOfAdamW(HybridDeviceOptimizer):  # type: ignore[misc]
    """Megatron's optimizer in host memory, for AdamW's shards; Muon's are in its groups alone.

    It waits on the host for gradients. So its step is on a stream that is not behind Muon's part.
    """

    muon: DistributedMuon
    beside: Any
    state: Any
    param_groups: list[dict[str, Any]]

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        groups = self.param_groups
        self.param_groups = [
            {**group, "params": [p for p in group["params"] if not self.muon.owns(p)]}
            for group in groups
        ]
        try:
            return super()._get_sub_optimizer_param_groups(offload_fraction)
        finally:
            self.param_groups = groups

    def _init_sub_optimizers(self) -> None:
        """Megatron's; the part on the device waits for gradients that another stream makes."""
        super()._init_sub_optimizers()
        if self.gpu_optimizer is not None:
            self.gpu_optimizer.register_step_pre_hook(
                lambda *_: torch.cuda.current_stream().wait_stream(self._d2h_stream)
            )

    def step(self, closure: None = None) -> None:
        """Megatron's; cores up to 0.14 do not wait for the weights that it copies."""
        with torch.cuda.stream(self.beside):
            super().step(closure)
        for group in self.param_groups:  # which a part on the device takes from here
            group["step"] = group.get("step", 0) + 1
        for stream in (self.beside, self._h2d_stream):
            torch.cuda.current_stream().wait_stream(stream)

    def dummy_step(self) -> None:
        """Give shards state as before the first step. Megatron's own takes a random one."""
        for adam in self.sub_optimizers:
            for main in (main for group in adam.param_groups for main in group["params"]):
                if not adam.state[main]:
                    keys = (MOMENTUM_KEY, _SECOND)
                    adam.state[main] = {key: torch.zeros_like(main) for key in keys}
                    if isinstance(adam, TORCH_ADAMS):
                        adam.state[main]["step"] = torch.zeros((), device=main.device)
        self._sync_sub_optimizers_state_to_hdo()
        if not self.state:  # for Megatron this would mean that no load has made any
            self.state[self.param_groups[0]["params"][0]] = {}

    def _update_fp32_params_by_new_state(self) -> None:
        self.state = {shard: each for shard, each in self.state.items() if _MASTER in each}
        super()._update_fp32_params_by_new_state()


class OfHybrid(OfWeights):
    """State in host memory: AdamW's is HybridDeviceOptimizer's, Muon's comes here by round.

    Shards are slices of the model's bf16 or fp16 weights. Muon's main parameters are whole, or the
    16 bits that a bf16 weight lacks; its momentum is fp32 or bf16.
    """

    adamw_is_last = True
    _memory: HostMemory

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        # Muon's, by id of shard, and key
        self._places: dict[tuple[int, str], tuple[Name, int, int]] = {}

    def hold(self, muon: DistributedMuon, config: Any) -> None:
        """Make Muon's state: of some rounds, evenly, on the host, at least the fraction asked."""
        stream: Any = torch.cuda.Stream
        self._optimizer.muon, self._optimizer.beside = muon, stream(muon.exchange.device)
        self._memory = HostMemory(muon.exchange.device, MOMENTUM_KEY)
        halves = config.bf16 and getattr(config, "store_param_remainders", False)
        hosted = seen = 0
        for number, round in enumerate(muon.rounds):
            shards = [muon.main_params[index] for index in round.parameters]
            size = sum(shard.numel() for shard in shards)
            seen += size
            on_host = hosted < config.optimizer_offload_fraction * seen
            hosted += on_host * size
            self._add((number, MOMENTUM_KEY), shards, config.exp_avg_dtype, on_host)
            kept = torch.int16 if halves else torch.float32
            self._add((number, MAIN_KEY), shards, kept, on_host)
        self._optimizer._init_sub_optimizers()  # without Muon's
        for shard in muon.main_params.values():
            self.reset_main(shard)

    def _add(self, name: Name, shards: list[Tensor], dtype: torch.dtype, on_host: bool) -> None:
        places = [0, *accumulate(shard.numel() for shard in shards)]
        for shard, (start, stop) in zip(shards, pairwise(places), strict=True):
            self._places[id(shard), name[1]] = name, start, stop
        self._memory.add(name, places[-1], dtype, on_host=on_host)

    def _held(self, shard: Tensor, key: str) -> Tensor:
        """A shard's state where it is now, as it is held."""
        if (id(shard), key) in self._places:
            name, start, stop = self._places[id(shard), key]
            return self._memory.at(name)[start:stop]
        inner: Tensor = self._optimizer.param_to_inner_param[shard].detach()
        held: Tensor = inner if key == MAIN_KEY else self._optimizer.state[shard][key]
        return held

    def begin(self) -> None:
        """See ``States``."""
        self._optimizer.beside.wait_stream(torch.cuda.current_stream())

    def visiting(self, round: int, key: str) -> AbstractContextManager[None]:
        """See ``States``."""
        return self._memory.visiting((round, key))

    def get(self, shard: Tensor, key: str) -> Tensor:
        """See ``States``; on the device."""
        held = self._held(shard, key).to(shard.device)
        return of_halves(shard.detach(), held) if held.dtype == torch.int16 else held.float()

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        held = self._held(shard, key)
        if held.dtype == torch.int16:
            low = torch.empty_like(held, device=shard.device)
            write_halves(wide, shard.detach(), low)
            held.copy_(low)
            return
        if key == MAIN_KEY and _MASTER in self._optimizer.state.get(shard, ()):  # AdamW's
            self._optimizer.state[shard][_MASTER] = held  # a load may have made it another tensor
        for target in (held, shard.detach()) if key == MAIN_KEY else (held,):
            if target.data_ptr() != wide.data_ptr():
                target.copy_(wide)

    def start_momentum(self, shard: Tensor) -> None:
        """All have state from the start."""

    def reset_main(self, shard: Tensor) -> None:
        """See ``OfWeights``."""
        self.put(shard, MAIN_KEY, shard.detach().to(torch.float32, copy=True))


def init_state_of(
    init_adam_state: Callable[..., None], states: States, muon: DistributedMuon | None
) -> Callable[..., None]:
    """Megatron's ``init_state_fn``, which gives Muon's shards a momentum and no second moment."""
    if isinstance(states, OfHybrid):
        return lambda optimizer, config=None: optimizer.dummy_step()

    def init_state(optimizer: Any, config: Any = None) -> None:
        for shard in () if muon is None else muon.main_params.values():
            states.start_momentum(shard)
        if isinstance(states, OfFusedAdam):
            for group in optimizer.param_groups:
                for shard in group["params"]:
                    states.start(shard)
        init_adam_state(optimizer, config)  # passes over parameters that have state
        if isinstance(optimizer, TORCH_ADAMS):
            for state in optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))

    return init_state
