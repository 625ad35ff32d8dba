"""What a step is beside the optimizers' own: Megatron's norm, clip and copy to 16-bit
weights, and the host's Python.

Norm and clip are Transformer Engine's kernels over all gradients. Each shard's copy is
a launch of its own. The all-gather of parameters is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_muon.lab.pricing.hardware import MICRO, Hardware
from megatron_muon.lab.pricing.work import WIDE, Optimizer, total

# Bytes of an element that are read and written.
BYTES = {"norm": 4, "clip": 4 + 4, "copy": 4 + 2}


def around(optimizers: Sequence[Optimizer], hardware: Hardware) -> dict[str, float]:
    """Seconds of each on the rank with most elements; FusedAdam's states need no
    copy.
    """
    most = max(total([one.elements for one in optimizers]))
    seconds = {name: most * each / hardware.memory for name, each in BYTES.items()}
    copies = any(one.has_main and one.held.main == WIDE.main for one in optimizers)
    return seconds | {"copy": seconds["copy"] * copies}


def python(optimizers: Sequence[Optimizer], hardware: Hardware) -> float:
    """Seconds of the host for Muon's shards of the rank that has most: their Python,
    and the launches of their copies.
    """
    shards: Counter[int] = Counter()
    for one in optimizers:
        each = {(cut.rank, cut.parameter) for cut in one.plan.slices}
        shards.update(rank for rank, _ in each)
    seconds = (hardware.shard_us + hardware.launch_us) * MICRO
    return seconds * max(shards.values(), default=0)
