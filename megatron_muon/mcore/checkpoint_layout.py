"""Refuse to load what is cut as a run's grad buffers were cut that were cut otherwise.

dp_reshardable keeps a tensor for each bucket of each model-parallel rank, dp_zero_gather_scatter a
blob for each such rank. Both load where TP, PP, virtual pipeline and EP are the same, the first
where buckets are, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.agreement import raise_together
from megatron_muon.mcore.checkpoint_buffers import MOMENTUM, OTHER_CUT
from megatron_muon.mcore.checkpoint_groups import RECORD
from megatron_muon.mcore.shards import device_of

_RANKS_OWN = re.compile(r"(?:^|\.)optimizer\.distributed\.dp_group_idx_\d+\.(.+)$")
_OF_A_BUCKET = re.compile(r"gbuf_idx_\d+\..*\.bucket_idx_\d+\.[^.]+$")
_MODEL_SPACE = re.compile(r"(chained_\d+\.)?optimizer\.state\.")

Sizes = dict[str, tuple[int, ...] | None]  # of all tensors by key; None for what is no tensor


def check_layout(sharded_state_dict: Mapping[str, Any], folder: str) -> None:
    """Compare what is to be loaded with what a torch_dist checkpoint has. Nothing is read but its
    metadata. Every rank of the world calls it.

    Raises:
        ValueError: the optimizer's state was cut in another way; names the first difference.
        RuntimeError: on ranks that have no error themselves when another has.
    """
    error: Exception | None = None
    try:
        wanted = dict(_wanted(sharded_state_dict))
        if any(_RANKS_OWN.search(key) or _MODEL_SPACE.match(key) for key in wanted):
            found = _sizes(folder)
            problem = _other_cut(wanted, found) or _other_prefix(wanted, found)
            error = ValueError(f"{folder}: {problem}") if problem else None
    except Exception as own:  # whatever it is, the other ranks must hear of it
        error = own
    raise_together(error, None, device_of([]))


def _wanted(state: Any) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """All that the optimizer asks for by keys as torch_dist has them, with the global sizes."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for each in state:
            yield from _wanted(each)
        return
    key = getattr(state, "key", None)
    if isinstance(key, str) and "optimizer." in key:
        is_tensor = hasattr(state, "local_shape")
        yield key, tuple(state.global_shape) if is_tensor else None


def _sizes(folder: str) -> Sizes:
    """Empty where it is no torch_dist checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if "://" in folder or not os.path.isfile(Path(folder) / ".metadata"):
        return {}
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key.split("/shard_")[0]: tuple(entry.size) if hasattr(entry, "size") else None
        for key, entry in entries.items()
    }


def _other_cut(wanted: Sizes, found: Sizes) -> str | None:
    """What says that the optimizer's buffers were cut otherwise; None where nothing does."""
    if not any(_is_record(key) for key in wanted) or not any(_is_record(key) for key in found):
        return None  # AdamW's: it has errors of its own
    for key, size in wanted.items():
        match = _RANKS_OWN.search(key)
        if not match:
            continue
        own = match[1]
        if key in found:
            if size is not None and found[key] != size:
                return f"{key} has {found[key]} elements there and {size} here. {OTHER_CUT}"
        elif _OF_A_BUCKET.match(own) or own == RECORD:
            return f"it has no {key}. {OTHER_CUT}"
        elif own.startswith(f"{RECORD}.{MOMENTUM}.") and _under_another(own, found):
            return f"it has {own} under another model-parallel rank than {key}. {OTHER_CUT}"
    return None


def _is_record(key: str) -> bool:
    match = _RANKS_OWN.search(key)
    return match is not None and match[1] == RECORD


def _under_another(own: str, found: Sizes) -> bool:
    return any((match := _RANKS_OWN.search(key)) and match[1] == own for key in found)


def _other_prefix(wanted: Sizes, found: Sizes) -> str | None:
    """Before core 0.14 the keys say how many optimizers a chain has; one more with EP."""
    prefixes = [
        {match[1] for key in keys if f".{MOMENTUM}." in key and (match := _MODEL_SPACE.match(key))}
        for keys in (wanted, found)
    ]
    if all(prefixes) and not prefixes[0] <= prefixes[1]:
        return (
            "this Megatron cannot load optimizer state with expert parallelism that was saved "
            "without it, nor without it what was saved with it: EP must stay 1 or stay above 1"
        )
    return None
