"""State in host memory (``optimizer_cpu_offload``): Muon's comes to the device by
round, AdamW's is updated on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from megatron_muon.mcore.host.states import (
    MASTER_KEY,
    SECOND_KEY,
    TORCH_ADAMS,
    OfWeights,
)
from megatron_muon.rules.muon import MOMENTUM_KEY, DistributedMuon
from megatron_muon.runtime.exchange.host import HostMemory, Name
from megatron_muon.runtime.patches import replaced
from megatron_muon.runtime.states import MAIN_KEY, of_halves, write_halves


class HybridOfAdamW(HybridDeviceOptimizer):  # type: ignore[misc]
    """Megatron's optimizer in host memory, for AdamW's shards; Muon's shards are only
    in its groups.

    It waits on the host for gradients. So its step is on a stream that does not wait
    for Muon's part.
    """

    muon: DistributedMuon
    beside: Any
    state: Any
    param_groups: list[dict[str, Any]]

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> Any:
        adamws = [
            {**group, "params": [p for p in group["params"] if not self.muon.owns(p)]}
            for group in self.param_groups
        ]
        with replaced(self, param_groups=adamws):
            return super()._get_sub_optimizer_param_groups(offload_fraction)

    def _init_sub_optimizers(self) -> None:
        """Make Megatron's parts; the one on the device waits for gradients of another
        stream.
        """
        super()._init_sub_optimizers()
        if self.gpu_optimizer is not None:
            self.gpu_optimizer.register_step_pre_hook(
                lambda *_: torch.cuda.current_stream().wait_stream(self._d2h_stream)
            )

    def step(self, closure: None = None) -> None:
        """Step as Megatron does, and wait for its copies of weights, which cores up to
        0.14 do not.
        """
        with torch.cuda.stream(self.beside):
            super().step(closure)
        for group in self.param_groups:  # which a part on the device takes from here
            group["step"] = group.get("step", 0) + 1
        for stream in (self.beside, self._h2d_stream):
            torch.cuda.current_stream().wait_stream(stream)

    def dummy_step(self) -> None:
        """Give shards the state before a first step. Megatron's takes a random step."""
        for adam in self.sub_optimizers:
            groups = adam.param_groups
            for main in chain.from_iterable(group["params"] for group in groups):
                state = adam.state[main]
                if not state:
                    state[MOMENTUM_KEY] = torch.zeros_like(main)
                    state[SECOND_KEY] = torch.zeros_like(main)
                    if isinstance(adam, TORCH_ADAMS):
                        state["step"] = torch.zeros((), device=main.device)
        self._sync_sub_optimizers_state_to_hdo()
        for group in self.param_groups if not self.state else ():
            # an empty state would tell Megatron that nothing was loaded
            for shard in group["params"]:
                self.state[shard] = {"step": torch.tensor(float(group.get("step", 0)))}

    def _update_fp32_params_by_new_state(self) -> None:
        self.state = {
            shard: state for shard, state in self.state.items() if MASTER_KEY in state
        }
        super()._update_fp32_params_by_new_state()


class OfHybrid(OfWeights):
    """State in host memory: AdamW's is HybridDeviceOptimizer's, Muon's comes here by
    round.

    Shards are slices of the model's bf16 or fp16 weights. Muon's main parameters are
    whole, or the 16 bits that a bf16 weight lacks; its moments are fp32 or bf16.
    """

    adamw_is_last = True
    _memory: HostMemory

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        # Muon's, by id of shard, and key
        self._places: dict[tuple[int, str], tuple[Name, int, int]] = {}

    def hold(self, muon: DistributedMuon, config: Any) -> None:
        """Make Muon's state: on the host that of some rounds, evenly, and at least the
        fraction that the config asks for.
        """
        device = muon.exchange.device
        self._optimizer.muon = muon
        self._optimizer.beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = HostMemory(device, MOMENTUM_KEY)
        halves = config.bf16 and getattr(config, "store_param_remainders", False)
        hosted = seen = 0
        for number, round in enumerate(muon.rounds):
            shards = [muon.main_params[index] for index in round.parameters]
            size = sum(shard.numel() for shard in shards)
            seen += size
            on_host = hosted < config.optimizer_offload_fraction * seen
            hosted += on_host * size
            for key in muon.rule.state_keys:
                dtype = getattr(config, f"{key}_dtype")
                self._add((number, key), shards, dtype, on_host)
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
        if held.dtype == torch.int16:
            return of_halves(shard.detach(), held)
        return held.float()

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        held = self._held(shard, key)
        if held.dtype == torch.int16:
            low = torch.empty_like(held, device=shard.device)
            write_halves(wide, shard.detach(), low)
            held.copy_(low)
            return
        targets = [held]
        if key == MAIN_KEY:
            targets.append(shard.detach())
            state = self._optimizer.state.get(shard, {})
            if MASTER_KEY in state:  # AdamW's, and a load may have made another tensor
                state[MASTER_KEY] = held
        for target in targets:
            if target.data_ptr() != wide.data_ptr():
                target.copy_(wide)

    def start_state(self, shard: Tensor, keys: Sequence[str]) -> None:
        """Does nothing: all shards have state from the start."""

    def reset_main(self, shard: Tensor) -> None:
        """See ``OfWeights``."""
        self.put(shard, MAIN_KEY, shard.detach().to(torch.float32, copy=True))
