"""Main parameters and state of an optimizer's shards, in fp32, however the optimizer
holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

MAIN_KEY = "param"


class States:
    """Optimizer state of shards whose main parameters and moments are fp32.

    Args:
        optimizer: has ``state`` by shard, another dict after each load.
    """

    # whether get returns copies, so that put must follow a change
    are_copies = False
    # whether AdamW's part keeps the host busy, so that the rule's is launched before it
    adamw_is_last = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def grad(self, shard: Tensor) -> Tensor | None:
        """The shard's reduced gradient."""
        return shard.grad

    def set_grad(self, shard: Tensor, grad: Tensor | None) -> None:
        """Replace the shard's reduced gradient."""
        shard.grad = grad

    def get(self, shard: Tensor, key: str) -> Tensor:
        """``MAIN_KEY``: the main parameter; else a state by Adam's name; fp32, like the
        shard.
        """
        if key == MAIN_KEY:
            return shard.detach()
        state: Tensor = self._optimizer.state[shard][key]
        return state

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """Keep new values; ``wide`` may be overwritten."""
        held = self.get(shard, key)
        if held.data_ptr() != wide.data_ptr():
            held.copy_(wide)

    def begin(self) -> None:
        """Gradients are ready on the current stream, and the rule's part of a step
        begins.
        """

    def steps(self) -> int:
        """The steps that Adam has counted, which come back with a checkpoint."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        counts = [group.get("step") or 0 for group in groups]
        first = [shard for group in groups for shard in group["params"][:1]]
        # torch's AdamW's
        counts += [state.get(shard, {}).get("step", 0) for shard in first]
        return int(max(counts, default=0))

    def visiting(self, round: int, key: str) -> AbstractContextManager[None]:
        """A context in which that state of a round's shards is on the device."""
        return nullcontext()

    def start_state(self, shard: Tensor, keys: Sequence[str]) -> None:
        """Give a shard without state zeros under each of the rule's keys."""
        state = self._optimizer.state[shard]
        if state:
            return
        for key in keys:
            state[key] = torch.zeros_like(shard, dtype=torch.float32)

    def load(self, load_state_dict: Callable[[Any], None], state_dict: Any) -> None:
        """Load a state dict of Megatron's, whose tensors have sizes and no values
        yet.
        """
        load_state_dict(state_dict)


def of_halves(high: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that ``write_halves`` has written.

    Args:
        high: bf16.
        remainder: int16, of the same shape.
    """
    bits = high.view(torch.int16).to(torch.int32)
    return bits.mul_(1 << 16).add_(remainder).view(torch.float32)


def write_halves(wide: Tensor, high: Tensor, remainder: Tensor) -> None:
    """Write fp32 values as bf16 and the lower 16 bits, as Transformer Engine does.

    The bf16 value is the nearest one. In a tie it is the one away from zero, where
    torch takes the even one, since the remainder's sign says which way it was rounded.

    Args:
        wide: overwritten.
        high, remainder: bf16 and int16; written.
    """
    bits = wide.view(torch.int32)
    remainder.copy_(bits)  # its lower half, with a sign
    bits.sub_(remainder).bitwise_right_shift_(16)
    high.view(torch.int16).copy_(bits)
