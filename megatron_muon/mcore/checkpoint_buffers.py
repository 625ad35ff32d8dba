"""Optimizer state of a whole grad buffer, as Megatron gathers it, to and from what is on disk.

Megatron gathers each buffer to DP rank 0 as three flat tensors, ``param``, ``exp_avg`` and
``exp_avg_sq``, with an element for every one of the buffer's parameters. On disk ``param`` stays as
it is, and in place of the other two is one dict, ``state``: for each parameter by name the tensors
that its optimizer has. So there are no zeros in place of a second moment that Muon does not have,
every tensor is known by a name, and a Megatron without Muon stops with KeyError: 'exp_avg'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

MOMENTUM = "muon_momentum"  # on disk; in memory it goes by a name that fused Adams know
ADAMW_STATE = ("exp_avg", "exp_avg_sq")
STATE = "state"


class Place(NamedTuple):
    """Where a parameter is in the gathered tensors of its buffer, and what is saved of it."""

    name: str
    start: int
    stop: int
    is_muon: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """What is on disk beside the main parameter."""
        return (MOMENTUM,) if self.is_muon else ADAMW_STATE


def gathered_spans(buffer: Any) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """``(parameter, start, stop)`` in a gathered tensor of a grad buffer, in Megatron's order.

    The gathered tensor leaves out the padding at the end of each bucket, ``param_index_map`` has
    it. (fully_reshardable of Megatron 0.15 to 0.19 takes the one for the other, so that with
    several buckets it saves shifted state, AdamW's too.)
    """
    removed, padding = [], 0
    for bucket in buffer.buckets:
        removed.append(padding)
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    for param, (start, stop, bucket_id) in buffer.param_index_map.items():
        yield param, start - removed[bucket_id], stop - removed[bucket_id]


def to_disk(gathered: dict[str, Any], places: list[Place]) -> dict[str, Any]:
    """What is written for a buffer.

    Args:
        gathered: ``param``, ``exp_avg`` and ``exp_avg_sq``, flat fp32, and ``numel_unpadded``.
        places: of the buffer's parameters.
    """
    kept = {key: value for key, value in gathered.items() if key not in ADAMW_STATE}
    kept[STATE] = {
        place.name: {
            key: gathered[source][place.start : place.stop].clone()  # a view saves all of it
            for key, source in zip(place.keys, ADAMW_STATE, strict=False)
        }
        for place in places
    }
    return kept


def from_disk(saved: Mapping[str, Any], places: list[Place]) -> dict[str, Any]:
    """What ``to_disk`` was given; the second moment of Muon's parameters is of no meaning.

    Raises:
        ValueError: a parameter's state is missing or not what it should be; names it.
    """
    states = saved.get(STATE)
    if not isinstance(states, dict):
        raise ValueError(
            f"the checkpoint's optimizer state has {sorted(map(str, saved))} and no {STATE!r} of "
            "each parameter: it was not saved by megatron_muon's Muon"
        )
    unknown = sorted(states.keys() - {place.name for place in places})
    if unknown:
        raise ValueError(f"the checkpoint has state of {unknown[0]}, which is not in this model")
    whole = {key: torch.zeros_like(saved["param"]) for key in ADAMW_STATE}
    for place in places:
        tensors = states.get(place.name, {})
        for key, target in zip(place.keys, ADAMW_STATE, strict=False):
            check_tensor(place.name, key, tensors, place.stop - place.start)
            whole[target][place.start : place.stop] = tensors[key]
    return {**{key: value for key, value in saved.items() if key != STATE}, **whole}


def check_tensor(name: str, key: str, tensors: Mapping[str, Any], numel: int) -> None:
    """Refuse what cannot be the state of a parameter.

    Args:
        name: the parameter's.
        key: what it is.
        tensors: by key; this one should be fp32 with ``numel`` elements.

    Raises:
        ValueError: it is missing, or of another size or dtype.
    """
    tensor = tensors.get(key)
    if not isinstance(tensor, Tensor):
        there = ", ".join(sorted(k for k, v in tensors.items() if isinstance(v, Tensor)))
        raise ValueError(f"the checkpoint has no {key} of {name}, only: {there or 'nothing'}")
    if tensor.numel() != numel:
        raise ValueError(f"{key} of {name} has {tensor.numel()} elements on disk, {numel} here")
    if tensor.dtype != torch.float32:
        raise ValueError(f"{key} of {name} is {tensor.dtype} on disk, torch.float32 here")
