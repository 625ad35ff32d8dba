"""Optimizer state of a whole grad buffer: between the form in which Megatron gathers it and disk.

Megatron gathers each buffer to DP rank 0 as three flat tensors, ``param``, ``exp_avg`` and
``exp_avg_sq``, with an element for every one of the buffer's parameters. On disk ``param`` stays as
it is. One dict, ``state``, replaces the other two: for each parameter by name the tensors that its
optimizer has. So the disk has no zeros for a second moment that Muon does not have, every tensor is
known by a name, and a Megatron without Muon stops with KeyError: 'exp_avg'.
``spans`` says where each parameter is in ``param``: with other buckets it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

MOMENTUM = "muon_momentum"  # on disk; in memory it goes by a name that fused Adams know
ADAMW_STATE = ("exp_avg", "exp_avg_sq")
STATE = "state"
SPANS = "spans"

OTHER_CUT = (
    "The optimizer's state was saved in a format that loads only with the TP, PP, virtual pipeline "
    "and EP sizes of the run that saved it; DP, CP, buckets and optimizer instances may differ. "
    "Load it with those and save it in the format that loads with any: in Megatron-LM "
    "--dist-ckpt-optim-fully-reshardable, before 0.15 --ckpt-fully-parallel-save. (AdamW's "
    "dp_reshardable loads with its buckets alone, too: --ddp-num-buckets, or --muon-dp-layout "
    "bucketed for Megatron's own)"
)


class BufferPlace(NamedTuple):
    """Where a parameter is in the gathered tensors of its buffer, and what is saved of it."""

    name: str
    start: int
    stop: int
    is_muon: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """The names on disk beside the main parameter."""
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


def to_disk(gathered: dict[str, Any], places: list[BufferPlace]) -> dict[str, Any]:
    """The tensors that are written for a buffer.

    Args:
        gathered: ``param``, ``exp_avg`` and ``exp_avg_sq``, flat fp32, and ``numel_unpadded``.
        places: the places of the buffer's parameters.
    """
    kept = {key: value for key, value in gathered.items() if key not in ADAMW_STATE}
    kept[STATE] = {
        place.name: {
            key: gathered[source][place.start : place.stop].clone()  # a view saves all of it
            for key, source in zip(place.keys, ADAMW_STATE, strict=False)
        }
        for place in places
    }
    kept[SPANS] = {place.name: (place.start, place.stop) for place in places}
    return kept


def from_disk(saved: Mapping[str, Any], places: list[BufferPlace], numel: int) -> dict[str, Any]:
    """The reverse of ``to_disk``; the second moment of Muon's parameters has no meaning.

    Args:
        saved: the tensors on disk for a buffer.
        places: the places of the buffer's parameters here.
        numel: elements of the gathered tensors here.

    Raises:
        ValueError: a parameter's state is missing or not what it should be; names it.
    """
    states = saved.get(STATE)
    if not isinstance(states, dict):
        raise ValueError(
            f"the checkpoint's optimizer state has {sorted(map(str, saved))} and no {STATE!r} of "
            "each parameter: it was not saved by megatron_muon's Muon"
        )
    here = {place.name: (place.start, place.stop) for place in places}
    spans = saved.get(SPANS, here)
    _check_spans(spans, here)
    unknown = sorted(states.keys() - here.keys())
    if unknown:
        raise ValueError(f"the checkpoint has state of {unknown[0]}, which is not in this model")
    on_disk = saved.get("numel_unpadded", numel) if SPANS in saved else numel
    check_tensor("the grad buffer", "param", saved, on_disk)
    whole = {key: torch.zeros(numel) for key in ("param", *ADAMW_STATE)}
    for place in places:
        start, stop = spans[place.name]
        whole["param"][place.start : place.stop] = saved["param"][start:stop]
        tensors = states.get(place.name, {})
        for key, target in zip(place.keys, ADAMW_STATE, strict=False):
            check_tensor(place.name, key, tensors, place.stop - place.start)
            whole[target][place.start : place.stop] = tensors[key]
    kept = {key: value for key, value in saved.items() if key not in (STATE, SPANS)}
    return {**kept, **whole, "numel_unpadded": numel}


Spans = Mapping[str, tuple[int, int]]


def _check_spans(saved: Spans, here: Spans) -> None:
    """Refuse the buffer of a rank that had other parameters, or other parts of them."""
    unknown, missing = sorted(saved.keys() - here.keys()), sorted(here.keys() - saved.keys())
    if unknown or missing:
        there, not_here = (f", but not {n[0]}" if n else "" for n in (missing, unknown))
        raise ValueError(
            f"a grad buffer of this rank has {len(here)} parameters{not_here}, the one on disk "
            f"{len(saved)}{there}. {OTHER_CUT}"
        )
    for name, (start, stop) in here.items():
        on_disk, wanted = saved[name][1] - saved[name][0], stop - start
        if on_disk != wanted:
            raise ValueError(f"{name} has {on_disk} elements on disk, {wanted} here. {OTHER_CUT}")


def check_tensor(name: str, key: str, tensors: Mapping[str, Any], numel: int) -> None:
    """Refuse what cannot be the state of a parameter.

    Args:
        name: the parameter's.
        key: its name on disk.
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
