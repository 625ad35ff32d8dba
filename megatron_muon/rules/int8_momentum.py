"""A momentum in one byte an element: blocks of 256 elements, each with an fp32 scale.

A block's largest element is 1 times its scale, the others are the nearest of 255
values: dynamic tree quantization (arXiv 2110.02861, section 1.3), for Muon in arXiv
2509.23106. The largest value is 1 on both sides, so that reading and writing again
changes no bit. An element is off by at most ``MOST_OFF`` of its block's largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron_muon.rules.muon import MOMENTUM_KEY, DistributedMuon
from megatron_muon.runtime.states import States

BLOCK = 256  # elements, counted from the first one of the parameter's TP slice
AT_ONCE = 1 << 22  # elements, which bounds scratch memory
DECADES = 7
# half of the distance from 1 to the next value
MOST_OFF = 0.75 * 0.9 / 2 ** (DECADES - 1)


def values_on(device: torch.device) -> Tensor:
    """The 255 values, ascending: in the k-th decade below 1 half as many as in the one
    above it.
    """
    positive: list[float] = []
    for decade in range(DECADES):
        count = 2**decade
        width = 0.9 / count
        factor = 10.0 ** (decade + 1 - DECADES)
        positive += [factor * (0.1 + width * (k + 0.5)) for k in range(count)]
    positive[-1] = 1.0
    return torch.tensor(
        [*(-value for value in reversed(positive)), 0.0, *positive], device=device
    )


class InBlocks(States):
    """States with Muon's momentum in blocks, in one fp32 tensor a shard: scales, then
    codes. A block that the edge of a shard cuts has two scales.

    Fused Adam classes refuse other dtypes and keys. The tensor stays where Megatron
    loads tensors without values.

    Args:
        optimizer: see ``States``.
        starts: by ``id`` of a shard of Muon's, its first element in the parameter's TP
            slice.
    """

    are_copies = True
    _values: Tensor | None = None

    def __init__(self, optimizer: Any, starts: Mapping[int, int]) -> None:
        super().__init__(optimizer)
        self._starts = starts

    @classmethod
    def of(cls, optimizer: Any, muon: DistributedMuon) -> InBlocks:
        """The states of an Adam with ``muon`` in it."""
        spans = muon.exchange.own.shards
        ids = {index: id(shard) for index, shard in muon.main_params.items()}
        return cls(optimizer, {ids[at]: span.start for at, span in spans.items()})

    def get(self, shard: Tensor, key: str) -> Tensor:
        """See ``States``."""
        held = super().get(shard, key)
        is_packed = key == MOMENTUM_KEY and id(shard) in self._starts
        return self._unpacked(shard, held) if is_packed else held

    def put(self, shard: Tensor, key: str, wide: Tensor) -> None:
        """See ``States``."""
        if key != MOMENTUM_KEY or id(shard) not in self._starts:
            super().put(shard, key, wide)
        else:
            self._pack(shard, super().get(shard, key), wide)

    def start_state(self, shard: Tensor, keys: Sequence[str]) -> None:
        """See ``States``."""
        state = self._optimizer.state[shard]
        if not state:
            size = self._blocks(shard) + -(-shard.numel() // 4)
            for key in keys:
                state[key] = torch.zeros_like(shard, dtype=torch.float32)
            state[MOMENTUM_KEY] = state[MOMENTUM_KEY].new_zeros(size)

    def load(self, load_state_dict: Callable[[Any], None], state_dict: Any) -> None:
        """See ``States``."""
        own, saved = self._optimizer.param_groups, state_dict["param_groups"]
        shards = chain.from_iterable(group["params"] for group in own)
        keys = chain.from_iterable(group["params"] for group in saved)
        mine = {
            key: shard
            for key, shard in zip(keys, shards, strict=True)
            if id(shard) in self._starts
        }
        kept = {
            shard: super(InBlocks, self).get(shard, MOMENTUM_KEY)
            for shard in mine.values()
        }
        state = {}
        for key, held in state_dict["state"].items():
            # Muon has no second moment
            names = held.keys() & {"step"} if key in mine else held.keys()
            state[key] = {name: held[name] for name in names}
        load_state_dict({**state_dict, "state": state})
        for shard, momentum in kept.items():
            self._optimizer.state[shard][MOMENTUM_KEY] = momentum

    def _unpacked(self, shard: Tensor, held: Tensor) -> Tensor:
        wide = torch.empty(shard.numel(), device=shard.device)
        values = self._values_of(shard)
        for start, stop, before, scales, codes in self._parts(shard, held):
            here = wide[start:stop]
            torch.index_select(values, 0, codes.int(), out=here)
            here.mul_(
                scales[:, None]
                .expand(-1, BLOCK)
                .reshape(-1)[before : before + len(here)]
            )
        return wide

    def _pack(self, shard: Tensor, held: Tensor, wide: Tensor) -> None:
        values = self._values_of(shard)
        middles = (values[1:] + values[:-1]) / 2
        for start, stop, before, scales, codes in self._parts(shard, held):
            edges = before, -(before + stop - start) % BLOCK
            blocks = torch.nn.functional.pad(wide[start:stop], edges).view(-1, BLOCK)
            torch.linalg.vector_norm(blocks, float("inf"), dim=1, out=scales)
            blocks.div_(torch.where(scales == 0, 1.0, scales)[:, None])
            nearest = torch.bucketize(blocks.view(-1), middles, out_int32=True)
            codes.copy_(nearest[before : before + stop - start])
            del blocks, nearest  # before the next ones are made

    def _parts(
        self, shard: Tensor, held: Tensor
    ) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
        """Elements from and to; those of their first block before them; scales;
        codes.
        """
        blocks = self._blocks(shard)
        before = self._starts[id(shard)] % BLOCK
        start, codes = 0, held[blocks:].view(torch.uint8)
        for scales in torch.split(held[:blocks], AT_ONCE // BLOCK):
            stop = min(start + len(scales) * BLOCK - before, shard.numel())
            yield start, stop, before, scales, codes[start:stop]
            start, before = stop, 0

    def _blocks(self, shard: Tensor) -> int:
        return -(-(self._starts[id(shard)] % BLOCK + shard.numel()) // BLOCK)

    def _values_of(self, shard: Tensor) -> Tensor:
        if self._values is None or self._values.device != shard.device:
            self._values = values_on(shard.device)
        return self._values
