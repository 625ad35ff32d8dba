"""Optimizer state of a whole grad buffer: from Megatron's gathered form to that on
disk, and back.

Megatron gathers each buffer to DP rank 0 as three flat tensors, ``param``, ``exp_avg``
and ``exp_avg_sq``, which cover all of the buffer's parameters. On disk ``param`` stays
as it is. One dict, ``state``, replaces the other two: parameter name → the tensors of
its optimizer. So no zeros are saved for the second moment that Muon does not have, and
every tensor has a name. A Megatron without Muon stops with KeyError: 'exp_avg'.
``spans`` says where each parameter lies in ``param``, since other buckets put it
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_muon.console import say
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.settings.config import named

# the key of Muon's settings, beside "optimizer" in its state dict
RECORD = "megatron_muon"
FORMAT = 1  # of the record
# Raised where "auto" chooses strips or an iteration by other rules, so that the same
# settings round differently. 0.2.0 and earlier, whose records lack it, are 1.
CHOICES = 4
MOMENTUM = "muon_momentum"  # on disk; in memory it has a name that fused Adams know
ADAMW_STATE = ("exp_avg", "exp_avg_sq")
STATE = "state"
# Second moments, which homes keep, beside "optimizer" in its state dict: see
# ``home_key``.
HOME_STATE = "megatron_muon_homes"
AT_DP_ZERO = "dp_zero_gather_scatter"  # a format of Megatron's
SPANS = "spans"

OTHER_CUT = (
    "The optimizer's state was saved in a format that loads only with the TP, PP, "
    "virtual pipeline and EP sizes of the run that saved it; DP, CP, buckets and "
    "optimizer instances may differ. Load it with those and save it in the format that "
    "loads with any: in Megatron-LM --dist-ckpt-optim-fully-reshardable, before 0.15 "
    "--ckpt-fully-parallel-save. (AdamW's dp_reshardable loads with its buckets alone, "
    "too: --ddp-num-buckets, or --muon-dp-layout bucketed for Megatron's own.) In "
    "Python give sharded_state_dict the metadata of the save, and load AdamW's "
    "checkpoint within megatron_muon.reading_adamw"
)


# where a checkpoint has second moments of other units
OTHER_UNITS = (
    f"Second moments of {named('rule')} {{rule}} belong to units: give "
    f"{named('splits')} and {named('split_qkv')} as at the save. To go on with other "
    "units, load it once by the rule muon and save: that save has no second moments, "
    "so they start at zero, and the momentum goes on"
)


def home_key(rule: str) -> str:
    """The key on disk of a rule's second moments; another rule's are not taken for
    them.
    """
    return f"{HOME_STATE}_{rule}"


def other_units(key: str) -> str:
    """The way out where what homes keep under a key is of other units."""
    return OTHER_UNITS.format(rule=key.removeprefix(f"{HOME_STATE}_"))


Gathered = dict[str, Any]  # the state of a whole grad buffer


class BufferPlace(NamedTuple):
    """A parameter's place in the gathered tensors of its buffer, and its optimizer."""

    name: str
    start: int
    stop: int
    keys: tuple[str, ...]  # of its state on disk, without the main parameter


def gathered_spans(buffer: Any) -> Iterator[tuple[Parameter, int, int]]:
    """``(parameter, start, stop)`` in a gathered tensor of a grad buffer, in Megatron's
    order.

    The gathered tensor has no padding at the end of a bucket, but ``param_index_map``
    counts it. (fully_reshardable of Megatron 0.15 to 0.19 confuses
    the two, so with several padded buckets it saves shifted state, AdamW's too.)
    """
    removed = [0, *accumulate(map(_padding, buffer.buckets))]
    for param, (start, stop, bucket_id) in buffer.param_index_map.items():
        yield param, start - removed[bucket_id], stop - removed[bucket_id]


def warn_if_shifted(buffers: Sequence[Any]) -> None:
    """Print a warning if Megatron's fully_reshardable shifts state when it saves grad
    buffers.

    It does in core 0.15 to 0.19, behind the first bucket with padding: see
    ``gathered_spans``.
    """
    version, numbers = megatron_version()
    before_others = chain.from_iterable(buffer.buckets[:-1] for buffer in buffers)
    if numbers < (0, 20) and any(map(_padding, before_others)):
        say(
            "[megatron_muon] warning: fully_reshardable of megatron-core "
            f"{version} saves AdamW's state shifted where several buckets are padded, "
            "as here. A run that loads this save goes on with wrong weights. Give "
            "--ddp-num-buckets 1, or omit --dist-ckpt-optim-fully-reshardable"
        )


def _padding(bucket: Any) -> int:
    """The number of a bucket's last elements that are no parameter's."""
    return int(bucket.grad_data.numel() - bucket.numel_unpadded)


def to_disk(gathered: Gathered, places: list[BufferPlace]) -> Gathered:
    """A buffer's gathered state, three flat fp32 tensors, in the form that is
    written.
    """
    kept = {key: value for key, value in gathered.items() if key not in ADAMW_STATE}
    kept[STATE] = {
        place.name: {
            key: gathered[source][
                place.start : place.stop
            ].clone()  # a view saves the whole buffer
            for key, source in zip(place.keys, ADAMW_STATE, strict=False)
        }
        for place in places
    }
    kept[SPANS] = {place.name: (place.start, place.stop) for place in places}
    return kept


def from_disk(
    saved: Mapping[str, Any], places: list[BufferPlace], numel: int
) -> Gathered:
    """The inverse of ``to_disk``, with zeros as second moment of Muon's parameters.

    ``places`` and ``numel``, of a gathered tensor, are this run's. A ValueError names
    what is missing on disk.
    """
    states = saved.get(STATE)
    if not isinstance(states, dict):
        raise ValueError(
            f"the checkpoint's optimizer state has {sorted(map(str, saved))} and no "
            f"{STATE!r} of each parameter: it was not saved by megatron_muon's Muon"
        )
    here = {place.name: (place.start, place.stop) for place in places}
    spans = saved.get(SPANS, here)
    _check_spans(spans, here)
    unknown = sorted(states.keys() - here.keys())
    if unknown:
        raise ValueError(
            f"the checkpoint has state of {unknown[0]}, which is not in this model"
        )
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
    """Refuse a buffer that holds other parameters than the one here, or other parts of
    them.
    """
    unknown = sorted(saved.keys() - here.keys())
    missing = sorted(here.keys() - saved.keys())
    if unknown or missing:
        there, not_here = (f", but not {n[0]}" if n else "" for n in (missing, unknown))
        raise ValueError(
            f"a grad buffer of this rank has {len(here)} parameters{not_here}, the one "
            f"on disk {len(saved)}{there}. {OTHER_CUT}"
        )
    for name, (start, stop) in here.items():
        on_disk, wanted = saved[name][1] - saved[name][0], stop - start
        if on_disk != wanted:
            raise ValueError(
                f"{name} has {on_disk} elements on disk, {wanted} here. {OTHER_CUT}"
            )


def check_tensor(name: str, key: str, tensors: Mapping[str, Any], numel: int) -> None:
    """Refuse a parameter's tensor that is missing, not fp32, or has not ``numel``
    elements.
    """
    tensor = tensors.get(key)
    if not isinstance(tensor, Tensor):
        there = ", ".join(
            sorted(k for k, v in tensors.items() if isinstance(v, Tensor))
        )
        other = (
            f"; its optimizer must be that of the save ({named('muon_include')}, "
            f"{named('muon_exclude')})"
            if there and key in (MOMENTUM, *ADAMW_STATE)
            else ""
        )
        raise ValueError(
            f"the checkpoint has no {key} of {name}, only: {there or 'nothing'}{other}"
        )
    if tensor.numel() != numel:
        raise ValueError(
            f"{key} of {name} has {tensor.numel()} elements on disk, {numel} here"
        )
    if tensor.dtype != torch.float32:
        raise ValueError(
            f"{key} of {name} is {tensor.dtype} on disk, torch.float32 here"
        )


# --- state dicts ----------------------------------------------------------------------


def states_of(saved: Any) -> list[dict[Any, Any]]:
    """The state dicts of an optimizer, or of a chain, which is a list or has numbers
    for keys.
    """
    parts = saved or []
    if isinstance(saved, dict):
        if not saved or not all(isinstance(key, int) for key in saved):
            return [saved]
        parts = [saved[key] for key in sorted(saved)]
    return list(chain.from_iterable(map(states_of, parts)))


def groups_of(states: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The parameter groups in all of the state dicts."""
    for state in states:
        yield from inner_state(state).get("param_groups", ())


def inner_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of torch's optimizer; FP32Optimizer saves it without a wrapper."""
    inner = state.get("optimizer", state)
    return inner if isinstance(inner, Mapping) else {}


def of_both_kinds(groups: Iterable[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """Each parameter group twice, as dense weights' and as experts'."""
    every: list[dict[Any, Any]] = []
    for group in groups:
        every.append({**group, "is_expert_parallel": False})
        every.append({**group, "is_expert_parallel": True})
    return every
