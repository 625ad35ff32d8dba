"""State in host memory: Muon's comes to the device by round, AdamW's is updated where
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_muon.mcore.host.states import (
    MASTER_KEY,
    SECOND_KEY,
    TORCH_ADAMS,
    OfWeights,
)
from megatron_muon.rules.muon import MOMENTUM_KEY, DistributedMuon
from megatron_muon.runtime.exchange.host import HostMemory, Name
from megatron_muon.runtime.states import MAIN_KEY, of_halves, write_halves

Tensor = torch.Tensor


class HybridOfAdamW(HybridDeviceOptimizer):  # type: ignore[misc]
    """Megatron's optimizer in host memory, for AdamW's shards; Muon's are in its groups
    alone.

    It waits on the host for gradients. So its step is on a stream that is not behind
    Muon's part.
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
        """Megatron's; the part on the device waits for gradients that another stream
        makes.
        """
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
        """Give shards state as before the first step. Megatron's own takes a random
        one.
        """
        for adam in self.sub_optimizers:
            groups = adam.param_groups
            for main in chain.from_iterable(group["params"] for group in groups):
                if not adam.state[main]:
                    keys = (MOMENTUM_KEY, SECOND_KEY)
                    adam.state[main] = {key: torch.zeros_like(main) for key in keys}
                    if isinstance(adam, TORCH_ADAMS):
                        adam.state[main]["step"] = torch.zeros((), device=main.device)
        self._sync_sub_optimizers_state_to_hdo()
        for group in self.param_groups if not self.state else ():
            # for Megatron none would mean that no load has made any
            for shard in group["params"]:
                self.state[shard] = {"step": torch.tensor(float(group.get("step", 0)))}

    def _update_fp32_params_by_new_state(self) -> None:
        self.state = {
            shard: each for shard, each in self.state.items() if MASTER_KEY in each
        }
        super()._update_fp32_params_by_new_state()


class OfHybrid(OfWeights):
    """State in host memory: AdamW's is HybridDeviceOptimizer's, Muon's comes here by
    round.

    Shards are slices of the model's bf16 or fp16 weights. Muon's main parameters are
    whole, or the 16 bits that a bf16 weight lacks; its momentum is fp32 or bf16.
    """

    adamw_is_last = True
    _memory: HostMemory

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        # Muon's, by id of shard, and key
        self._places: dict[tuple[int, str], tuple[Name, int, int]] = {}

    def hold(self, muon: DistributedMuon, config: Any) -> None:
        """Make Muon's state: of some rounds, evenly, on the host, at least the fraction
        asked.
        """
        stream: Any = torch.cuda.Stream
        self._optimizer.muon, self._optimizer.beside = (
            muon,
            stream(muon.exchange.device),
        )
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

    def _add(
        self, name: Name, shards: list[Tensor], dtype: torch.dtype, on_host: bool
    ) -> None:
        places = [0, *accumulate(shard.numel() for shard in shards)]
        for shard, (start, stop) in zip(shards, pairwise(places), strict=True):
            self._places[id(shard), name[1]] = name, start, stop
        if shards:  # a rank may hold none of a round
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
        self._memory.begin()
        self._optimizer.beside.wait_stream(torch.cuda.current_stream())

    def visiting(self, round: int, key: str) -> AbstractContextManager[None]:
        """See ``States``."""
        return self._memory.visiting((round, key))

    def get(self, shard: Tensor, key: str) -> Tensor:
        """See ``States``; on the device."""
        held = self._held(shard, key).to(shard.device)
        return (
            of_halves(shard.detach(), held)
            if held.dtype == torch.int16
            else held.float()
        )

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        held = self._held(shard, key)
        if held.dtype == torch.int16:
            low = torch.empty_like(held, device=shard.device)
            write_halves(wide, shard.detach(), low)
            held.copy_(low)
            return
        # AdamW's
        if key == MAIN_KEY and MASTER_KEY in self._optimizer.state.get(shard, ()):
            self._optimizer.state[shard][MASTER_KEY] = (
                held  # a load may have made another one
            )
        for target in (held, shard.detach()) if key == MAIN_KEY else (held,):
            if target.data_ptr() != wide.data_ptr():
                target.copy_(wide)

    def start_state(self, shard: Tensor, keys: Sequence[str]) -> None:
        """All have state from the start."""

    def reset_main(self, shard: Tensor) -> None:
        """See ``OfWeights``."""
        self.put(shard, MAIN_KEY, shard.detach().to(torch.float32, copy=True))
