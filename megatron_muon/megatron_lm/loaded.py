"""The line that says what was loaded of Muon's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.host.shards import parts_of
from megatron_muon.mcore.routing.param_routing import of_any_number
from megatron_muon.runtime.consensus import gathered

Rates = tuple[float, float]  # a rate and a weight decay
Parameter = tuple[bool, str]  # whether AdamW's, and its name


def say_loaded(optimizer: Any, folder: Path, *, is_checked: bool) -> None:
    """Print on rank 0 what was loaded of Muon's own checkpoint, and with which rates it
    goes on.

    Every rank of the world calls it.

    Args:
        optimizer: Muon's chain, after the load.
        is_checked: whether the files have been compared with the checkpoint's manifest.
    """
    every = gathered(lambda: _of_this_rank(optimizer))
    if dist.get_rank() != 0:
        return
    matrices = 0
    first: dict[Rates, Parameter] = {}
    for count, groups in every:
        matrices += count
        for (lr, decay), parameter in groups:
            first[lr, decay] = min(parameter, first.get((lr, decay), parameter))
    muons_first = sorted(first.items(), key=lambda item: item[1])
    rates = "; ".join(
        f"{lr:.6g} and {decay:.6g} ({name}, …)"
        for (lr, decay), (_, name) in muons_first
    )
    checked = "files checked" if is_checked else "files not checked"
    say(
        f"[megatron_muon] loaded {folder}: {checked}, momentum of {matrices} matrices; "
        f"first rates and weight decays: {rates}"
    )


def _of_this_rank(
    optimizer: Any,
) -> tuple[int, list[tuple[Rates, Parameter]]]:
    """The stage's number of matrices, on the rank that speaks for it, and each group's
    rates, with one of this rank's parameters in it.
    """
    matrices = 0
    groups = []
    for part in parts_of(optimizer):
        is_first = dist.get_rank(part.stage_group) == 0
        if is_first and part.distributed_optimizer_instance_id == 0:
            matrices += len(part.muon.plan.matrices)
        parameters = {
            id(shard): (param not in part._muons, of_any_number(part._name_of[param]))
            for param, shard in part._shard_of.items()
        }
        for group in part.optimizer.param_groups:
            if group["params"]:
                rates = (float(group["lr"]), float(group["weight_decay"]))
                first = min(parameters[id(shard)] for shard in group["params"])
                groups.append((rates, first))
    return matrices, groups
