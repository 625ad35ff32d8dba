"""Refuse a torch_dist checkpoint whose metadata shows another cut or another dtype.

dp_reshardable keeps the tensors of each model-parallel rank apart, dp_zero_gather_scatter a blob
for each such rank. So both load only with the same TP, PP, virtual pipeline and EP. And torch
silently casts a tensor that it reads to the dtype that it is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.mcore.checkpoint.buffers import MOMENTUM, OTHER_CUT
from megatron_muon.mcore.checkpoint.param_groups import RECORD
from megatron_muon.mcore.checkpoint.torch_dist import Tensor, read_metadata
from megatron_muon.mcore.wiring.buffers.shards import device_of
from megatron_muon.runtime.consensus import together

_RANKS_OWN = re.compile(r"(?:^|\.)optimizer\.distributed\.dp_group_idx_\d+\.(.+)$")
_MODEL_SPACE = re.compile(r"(chained_\d+\.)?optimizer\.state\.")

Tensors = dict[str, Tensor | None]  # by key; None for an object that is no tensor


def check_layout(sharded_state_dict: Mapping[str, Any], folder: str) -> None:
    """Compare the tensors to be loaded with the metadata of a torch_dist checkpoint.

    Only the metadata is read. Every rank of the world calls it.

    Raises:
        ValueError: the optimizer's state was cut in another way, or Muon's state has another dtype;
            names the first difference.
        RuntimeError: only another rank has an error.
    """
    together(lambda: _check_own(sharded_state_dict, folder), None, device_of([]))


def _check_own(sharded_state_dict: Mapping[str, Any], folder: str) -> None:
    wanted = dict(_wanted(sharded_state_dict))
    if not any(_RANKS_OWN.search(key) or _MODEL_SPACE.match(key) for key in wanted):
        return
    stored = _stored(folder)
    if not any(_is_record(key) or MOMENTUM in key for key in stored):
        return  # AdamW's formats have errors of their own
    for differs in (_other_cut, _other_prefix, _other_dtype):
        problem = differs(wanted, stored)
        if problem:
            raise ValueError(f"{folder}: {problem}")


def _wanted(state: Any) -> Iterator[tuple[str, Tensor | None]]:
    """``(key, tensor)`` for each entry that the optimizer asks torch_dist for."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for each in state:
            yield from _wanted(each)
        return
    key = getattr(state, "key", None)
    if isinstance(key, str) and "optimizer." in key:
        is_tensor = hasattr(state, "local_shape")
        yield key, Tensor(tuple(state.global_shape), state.dtype, ()) if is_tensor else None


def _stored(folder: str) -> Tensors:
    """The tensors in a checkpoint's metadata; empty if it is no torch_dist checkpoint."""
    if "://" in folder or not os.path.exists(Path(folder) / ".metadata"):
        return {}
    entries = read_metadata(Path(folder)).entries
    return {key.split("/shard_")[0]: entry for key, entry in entries.items()}


def _other_cut(wanted: Tensors, stored: Tensors) -> str | None:
    """For an error: a sign that the optimizer's buffers were cut otherwise; None without one."""
    if not any(map(_is_record, wanted)) or not any(map(_is_record, stored)):
        return None
    for key, tensor in wanted.items():
        match = _RANKS_OWN.search(key)
        if not match:
            continue
        own = match[1]
        if key in stored:
            there = stored[key]
            if tensor is not None and there is not None and there.size != tensor.size:
                return f"{key} has {there.size} elements there, {tensor.size} here. {OTHER_CUT}"
        elif own == RECORD:
            return f"it has no {key}. {OTHER_CUT}"
        elif own.startswith(f"{RECORD}.param.") and not any(
            f".{RECORD}.param." in k for k in stored
        ):
            return (
                "its main parameters are by bucket, as a megatron_muon before this one wrote them: "
                "save it there as fully_reshardable, or load the model alone (--no-load-optim)"
            )
        elif own.startswith(f"{RECORD}.{MOMENTUM}.") and _under_another(own, stored):
            return f"it has {own} under another model-parallel rank than {key}. {OTHER_CUT}"
    return None


def _is_record(key: str) -> bool:
    match = _RANKS_OWN.search(key)
    return match is not None and match[1] == RECORD


def _under_another(own: str, stored: Tensors) -> bool:
    return any((match := _RANKS_OWN.search(key)) and match[1] == own for key in stored)


def _other_prefix(wanted: Tensors, stored: Tensors) -> str | None:
    """For an error: EP is 1 on one side only. Before core 0.14 keys have ``chained_N.`` with EP."""
    prefixes = [
        {match[1] for key in keys if f".{MOMENTUM}." in key and (match := _MODEL_SPACE.match(key))}
        for keys in (wanted, stored)
    ]
    if all(prefixes) and not prefixes[0] <= prefixes[1]:
        return (
            "this Megatron cannot load optimizer state with expert parallelism that was saved "
            "without it, nor without it what was saved with it: EP must stay 1 or stay above 1"
        )
    return None


def _other_dtype(wanted: Tensors, stored: Tensors) -> str | None:
    """For an error: a dtype that differs; torch casts what it reads without a word."""
    for key, tensor in wanted.items():
        there = stored.get(key)
        if tensor is not None and there is not None and there.dtype != tensor.dtype:
            return (
                f"{key} is {there.dtype} on disk, {tensor.dtype} here: it was changed since Muon "
                "wrote it. Load another checkpoint, or the model alone (--no-load-optim)"
            )
    return None
