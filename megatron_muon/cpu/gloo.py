"""gloo in a CPU run: a faster gather of equal parts, and one device for all groups."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.runtime import collectives
from megatron_muon.runtime.patches import Function, Patches

# Methods that torch.distributed calls for all_gather_into_tensor in a coalescing
# manager; the first name is that of torch 2.13.
_NAMES = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def coalesced(patches: Patches) -> None:
    """``ProcessGroup``'s coalesced all-gather; groups of other backends keep theirs.

    It is Megatron's gather of the parameters
    (distributed/param_and_grad_buffer.py:290). gloo's goes around a ring, one step
    after the other, and takes about three times as long.
    """
    is_new = hasattr(dist.ProcessGroup, _NAMES[0])
    name = _NAMES[0] if is_new else _NAMES[1]
    original = getattr(dist.ProcessGroup, name, None)

    def gather(
        group: dist.ProcessGroup,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *options: Any,
    ) -> Any:
        if original is not None and dist.get_backend(group) != "gloo":
            return original(group, outputs, inputs, *options)
        tensors = []
        for output, mine in zip(outputs, inputs, strict=True):
            parts = torch.split(output.view(-1), mine.numel())
            # Megatron's is in its place
            if parts[group.rank()].data_ptr() != mine.data_ptr():
                parts[group.rank()].copy_(mine.reshape(-1))
            tensors.append(parts)
        return collectives.start_broadcasts("params/gather", tensors, group)

    patches.set(dist.ProcessGroup, name, gather)


def one_device(patches: Patches) -> None:
    """The groups of a process share the gloo device of its first group.

    Otherwise each group has a device, whose thread polls every 10 ms
    (gloo/transport/tcp/loop.cc). Megatron makes 30 to 90 groups on a rank: where ranks
    share processors, polling threads took 40 % of the time.
    """
    group: Any = dist.ProcessGroupGloo
    devices: dict[int, Any] = {}  # by process: a fork does not have the thread

    def with_device(
        init: Function,
        self: Any,
        *place: Any,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        known = devices.get(os.getpid())
        if timeout is None:  # its caller, not torch.distributed, names the devices
            init(self, *place, **options)
        elif known is None:
            init(self, *place, timeout=timeout, **options)
            devices[os.getpid()] = self.options._devices
        else:
            shared = group._Options()
            shared._devices = known
            shared._timeout = timeout
            shared._threads = 2 * len(known)
            init(self, *place, shared, **options)

    patches.wrap("torch.distributed", "ProcessGroupGloo.__init__", with_device)
