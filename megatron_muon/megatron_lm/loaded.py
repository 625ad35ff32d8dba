"""The line that says what was loaded of Muon's own checkpoint."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.mcore.host.shards import device_of, parts_of
from megatron_muon.mcore.load_check.models import TrainedModel
from megatron_muon.mcore.routing.param_routing import of_any_number
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import together


def say_loaded(
    optimizer: Any, trained: TrainedModel | None, folder: Path, *, is_checked: bool
) -> None:
    """Print on rank 0 what was loaded of Muon's own checkpoint, and with which rates it
    goes on.

    Every rank of the world calls it.

    Args:
        optimizer: Muon's chain, after the load.
        trained: the model of this rank.
        is_checked: whether the files have been compared with the checkpoint's digest.
    """
    parts = parts_of(optimizer)
    speaks = trained is not None and trained.stage.speaks
    device = device_of(optimizer.chained_optimizers[0].model_chunks)

    def own() -> str:
        matrices = sum(len(part.muon.plan.matrices) for part in parts) if speaks else 0
        groups = list(chain.from_iterable(map(_groups, parts)))
        return json.dumps([matrices, groups])

    every = [
        json.loads(text) for text in all_gather_texts(together(own, None, device), None)
    ]
    if dist.get_rank() != 0:
        return
    names: dict[tuple[float, float], list[Any]] = {}
    for _, groups in every:
        for lr, decay, *name in groups:
            names[lr, decay] = min(name, names.get((lr, decay), name))
    muons_first = sorted(names.items(), key=lambda item: item[1])
    rates = "; ".join(
        f"{lr:.6g} and {decay:.6g} ({name}, …)"
        for (lr, decay), (_, name) in muons_first
    )
    checked = "digest checked" if is_checked else "no digest checked"
    say(
        f"[megatron_muon] loaded {folder}: {checked}, momentum of "
        f"{sum(matrices for matrices, _ in every)} matrices; first rates and weight "
        f"decays: {rates}"
    )


def _groups(part: Any) -> list[tuple[float, float, bool, str]]:
    """Rate, decay, whether AdamW's, and a name of each group that this rank has shards
    of.
    """
    shards = {id(shard): param for param, shard in part._shard_of.items()}
    found = []
    for group in part.optimizer.param_groups:
        names = [
            (not part.muon.owns(shard), of_any_number(part._name_of[shards[id(shard)]]))
            for shard in group["params"]
        ]
        if names:
            found.append(
                (float(group["lr"]), float(group["weight_decay"]), *min(names))
            )
    return found
