"""What a checkpoint does not have: second moments of another rule, which start at zero,
and other state, by an error with the way out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon.mcore.checkpoint.buffers import (
    HOME_STATE,
    OTHER_CUT,
    OTHER_UNITS,
)
from megatron_muon.settings.config import named

_SECOND_MOMENT = re.compile(rf"\.{HOME_STATE}_([^.]+)\.")
_SAME_OPTIMIZER = (
    "Each parameter must belong to the same optimizer as at the save "
    f"({named('muon_include')}, {named('muon_exclude')})"
)
# A key of optimizer state in torch_dist, of a unit, a model-parallel rank or a whole
# weight, and what it takes to find it there.
_STATE = (
    (
        re.compile(rf"optimizer\.state\.{HOME_STATE}_(?P<rule>\w+)\.[^\]\s]*\]?"),
        OTHER_UNITS,
    ),
    (
        re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.[\w.]*\w"),
        f"{_SAME_OPTIMIZER}. {OTHER_CUT}",
    ),
    (
        re.compile(r"(chained_\d+\.)?optimizer\.state\.[\w.]*\w"),
        f"{_SAME_OPTIMIZER}; AdamW's own checkpoint loads within "
        "megatron_muon.reading_adamw. The format must be that of the save (metadata of "
        "sharded_state_dict), and before core 0.14 EP must stay 1 or stay above 1",
    ),
)
# Megatron of core 0.16 saves one of each DP rank where EP is above 1.
_RANDOM = re.compile(r"rng_state/shard_[\d._]*\d")
# Megatron lists all that there are
_KEYS_THERE = re.compile(r"not in state dict: \[[^\n]*")


def drop_absent(sharded_state_dict: Any, checkpoint_dir: Any) -> None:
    """Drop second moments from what is to be loaded where the checkpoint has none of
    their rule: they start at zero.

    Where it has some, on whichever rank, all stay, and Megatron names one that is
    missing.
    """
    wanted = list(_second_moments(sharded_state_dict))
    if not wanted:
        return
    there = dist_checkpointing.load_tensors_metadata(str(checkpoint_dir))
    rules = {key[1] for key in map(_SECOND_MOMENT.search, there) if key}
    for parent, name, rule in wanted:
        if rule not in rules:
            del parent[name]


def _second_moments(node: Any) -> Iterator[tuple[dict[Any, Any], Any, str]]:
    """Each dict that has a second moment, its key there, and the rule.

    Megatron's own walk (``nested_items_iter``) is not in core 0.20.
    """
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in children:
        if isinstance(child, ShardedTensor):
            key = _SECOND_MOMENT.search(child.key)
            if key:
                yield node, name, key[1]
        elif isinstance(child, (dict, list)):
            yield from _second_moments(child)


@contextmanager
def explained(folder: str, *, is_muons: bool = True) -> Iterator[None]:
    """Add the way out to an error that names state which is not in the checkpoint: of
    random numbers, and of the optimizer if it is Muon's.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        text = _KEYS_THERE.sub("", str(error))
        if key := _RANDOM.search(text):
            raise ValueError(
                f"{folder} has no {key[0]}: with experts spread over ranks, Megatron "
                "saved a state of random numbers for each DP rank, and this run has "
                "another number of these. Give --no-load-rng: dropout and a router's "
                "noise start anew from --seed; weights, optimizer state, schedule and "
                "data go on"
            ) from error
        for pattern, way_out in _STATE if is_muons else ():
            if key := pattern.search(text):
                way_out = way_out.format_map(key.groupdict())
                text = (
                    f"{folder} has no {key[0]}, or has it in another shape. {way_out}"
                )
                raise ValueError(text) from error
        raise
