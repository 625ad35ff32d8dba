"""All-gathers of equal parts over gloo, by broadcasts that are under way together."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.runtime import collectives
from megatron_muon.runtime.patches import Patches

# Methods that torch.distributed calls for all_gather_into_tensor in a coalescing manager; the first
# name is that of torch 2.13.
_NAMES = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")


def coalesced(patches: Patches) -> None:
    """``ProcessGroup``'s coalesced all-gather; groups of other backends keep theirs.

    It is Megatron's gather of the parameters (distributed/param_and_grad_buffer.py:290). gloo's
    goes around a ring, one step after the other, and takes about three times as long.
    """
    name = next((name for name in _NAMES if hasattr(dist.ProcessGroup, name)), _NAMES[-1])
    patches.set(dist.ProcessGroup, name, _gathered(getattr(dist.ProcessGroup, name, None)))


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
            if parts[group.rank()].data_ptr() != mine.data_ptr():  # Megatron's is in its place
                parts[group.rank()].copy_(mine.reshape(-1))
            tensors.append(parts)
        return collectives.start_broadcasts("params/gather", tensors, group)

    return gather
