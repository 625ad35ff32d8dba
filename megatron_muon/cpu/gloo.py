"""What a CPU run has otherwise over gloo: gathers of equal parts, and one device for
all groups.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.runtime import collectives
from megatron_muon.runtime.patches import Patches

# Methods that torch.distributed calls for all_gather_into_tensor in a coalescing
# manager; the first name is that of torch 2.13.
_NAMES = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def coalesced(patches: Patches) -> None:
    """``ProcessGroup``'s coalesced all-gather; groups of other backends keep theirs.

    It is Megatron's gather of the parameters
    (distributed/param_and_grad_buffer.py:290). gloo's goes around a ring, one step
    after the other, and takes about three times as long.
    """
    name = next(
        (name for name in _NAMES if hasattr(dist.ProcessGroup, name)), _NAMES[-1]
    )
    patches.set(
        dist.ProcessGroup, name, _gathered(getattr(dist.ProcessGroup, name, None))
    )


def _gathered(original: Callable[..., Any] | None) -> Callable[..., Any]:
    def gather(
        group: dist.ProcessGroup,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *options: Any,
    ) -> Any:
        if dist.get_backend(group) != "gloo":
            assert original is not None
            return original(group, outputs, inputs, *options)
        tensors = []
        for output, mine in zip(outputs, inputs, strict=True):
            parts = torch.split(output.view(-1), mine.numel())
            # Megatron's is in its place
            if parts[group.rank()].data_ptr() != mine.data_ptr():
                parts[group.rank()].copy_(mine.reshape(-1))
            tensors.append(parts)
        return collectives.start_broadcasts("params/gather", tensors, group)

    return gather


def one_device(patches: Patches) -> None:
    """The groups of a process share the gloo device of its first group.

    Each has one of its own otherwise, whose thread polls every 10 ms
    (gloo/transport/tcp/loop.cc). Megatron makes 30 to 90 groups on a rank: where ranks
    share processors, threads that only poll took 40 % of the time.
    """
    group: Any = dist.ProcessGroupGloo
    # by process: a fork does not have the thread
    begin, devices = (group.__init__, dict[int, Any]())

    def begins(
        self: Any, *place: Any, timeout: timedelta | None = None, **named: Any
    ) -> None:
        known = devices.get(os.getpid())
        if timeout is None:  # not by torch.distributed: with what its maker asks for
            begin(self, *place, **named)
        elif known is None:
            begin(self, *place, timeout=timeout, **named)
            devices[os.getpid()] = self.options._devices
        else:
            options = group._Options()
            options._devices, options._timeout, options._threads = (
                known,
                timeout,
                2 * len(known),
            )
            begin(self, *place, options, **named)

    patches.set(group, "__init__", begins)
