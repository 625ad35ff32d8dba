"""Second moments that a checkpoint of another rule does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_muon.mcore.checkpoint.buffers import home_key


def drop_absent(sharded_state_dict: Any, checkpoint_dir: Any, rule: str) -> None:
    """Drop second moments from what is to be loaded where the checkpoint has none of
    the rule: they start at zero.

    Where it has some, on whichever rank, all stay, and Megatron names one that is
    missing.
    """
    key = f".{home_key(rule)}."
    wanted = list(_second_moments(sharded_state_dict, key))
    if not wanted:
        return
    there = dist_checkpointing.load_tensors_metadata(str(checkpoint_dir))
    if any(key in other for other in there):
        return
    for parent, name in wanted:
        del parent[name]


def _second_moments(node: Any, key: str) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Each dict that has a second moment, and its key there."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, ShardedTensor) and key in child.key:
            yield node, name
        elif isinstance(child, (dict, list)):
            yield from _second_moments(child, key)
