"""The time of state on the host: Muon's on its way over the GPU's link, and AdamW's
step there.

Muon's momentum and main parameters come and go by round, in both directions at once,
beside the products; the first round's momentum is waited for. AdamW's step is torch's,
on the host, while Muon's runs on the device; its gradients come before it and its
weights go after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_muon.lab.pricing.hardware import GIGA, Hardware
from megatron_muon.lab.pricing.work import Optimizer, rounds_of

_GRADIENT, _WEIGHT = 4, 2  # bytes of an element on the link
# Read and written by torch's operations one by one: of lerp_, addcmul_ and addcdiv_ 12,
# 12 and 16 bytes, of mul_ twice, sqrt, div and add_ 8 each.
TORCH_ADAMW = 80


class HostTime(NamedTuple):
    """A rank's seconds; all are 0 where its state is on the device."""

    first: float = 0.0  # until the first round's momentum is there
    link: float = 0.0  # of all that Muon's part has moved one way
    adamw: float = 0.0  # of AdamW's part, its gradients' and weights' way included

    def step(self, on_device: float) -> float:
        """Seconds of a step whose work on the device takes ``on_device``."""
        return max(self.first + on_device, self.link, self.adamw)


def on_host(
    optimizers: Sequence[Optimizer], hardware: Hardware, *, with_muon: bool = True
) -> list[HostTime]:
    """By rank; without Muon all elements are AdamW's."""
    link = hardware.host_gbytes * GIGA
    of_adamw = (_GRADIENT + _WEIGHT) / link + TORCH_ADAMW / (
        hardware.host_memory_gbytes * GIGA
    )
    size = optimizers[0].plan.size
    first, moved, adamw = [0.0] * size, [0.0] * size, [0.0] * size
    for one in optimizers:
        held = one.held
        both = zip(one.elements, one.muon, strict=True)
        for rank, (elements, muon) in enumerate(both):
            muons = muon * with_muon
            moved[rank] += held.on_host * muons * (held.momentum + held.main)
            adamw[rank] += held.on_host * (elements - muons)
    held = optimizers[0].held
    rounds = rounds_of(optimizers[0].plan)
    if with_muon and rounds:
        first = [held.on_host * held.momentum * begun for begun in rounds[0].held]
    return [
        HostTime(bytes_before / link, nbytes / link, elements * of_adamw)
        for bytes_before, nbytes, elements in zip(first, moved, adamw, strict=True)
    ]
