"""The parameters in a digest, and whether a checkpoint was saved by the model that
loads it.

Names, shapes and optimizers do not depend on the model's parallelism. The vocabulary,
which is padded for TP, is not compared, nor are settings that change no shape:
Megatron-LM's ``--use-checkpoint-args`` takes them from the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_muon.console import first_names
from megatron_muon.mcore.host.process_groups import local_experts
from megatron_muon.mcore.load_check.digest import Digest, DigestError
from megatron_muon.mcore.load_check.models import TrainedModel, device_of_trained
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    partition_dim_of,
    weights,
    why_adamw,
)
from megatron_muon.runtime.collectives import all_gather_json, world_rank, world_ranks
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import ROWS, MuonConfig, named

Table = dict[str, dict[str, Any]]
Shape = tuple[int, ...]

# The names of one weight in different classes that torch_dist loads into one another:
# three of experts, and Transformer Engine's fused MLP. (Norms have many more; only
# matrices are compared.)
_SAME = (
    (re.compile(r"\.experts\.local_experts\.\d+\.(linear_fc[12])\."), r".experts.\1."),
    (re.compile(r"\.experts\.(linear_fc[12])\.weight\d+$"), r".experts.\1.weight"),
    (re.compile(r"\.experts\.weight([12])$"), r".experts.linear_fc\1.weight"),
    (re.compile(r"\.mlp\.1\.basic_ops\.0\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.3\.basic_ops\.0\."), ".mlp.linear_fc2."),
)
_OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")


def parameters_in_digest(trained: TrainedModel | None) -> Table:
    """``parameters`` of a digest, merged from all ranks; all of them call it."""
    own = together(lambda: _own_part(trained), None, device_of_trained(trained))
    merged: Table = {}
    for part in all_gather_json(own, None):
        merged |= part
    return merged


def require_same_model(saved: Digest, own: Table, folder: str, exact: bool) -> None:
    """Raise a DigestError that names the first parameter that differs between the
    checkpoint and ``own``, this model's.

    ``exact``: the checkpoint must not have parameters that the model lacks, and each
    parameter must have the optimizer that it has in this run.
    """
    different = f"{folder} was saved by a different model:"
    then = _sizes(saved["parameters"])
    now = _sizes(own)
    if missing := sorted(now.keys() - then.keys()):
        raise DigestError(
            f"{different} it has no {first_names(missing)}, which this model has "
            "(--no-muon-checkpoint-digest skips the check)"
        )
    for name in sorted(now):
        there = _size(then[name], now[name])
        here = _size(now[name], then[name])
        if there != here and not _VOCABULARY.search(name):
            raise DigestError(
                f"{different} {name}: {there} in the checkpoint, {here} in this model, "
                "over all ranks"
            )
    if exact and (unknown := sorted(then.keys() - now.keys())):
        raise DigestError(
            f"{different} it has {first_names(unknown)}, which this model lacks"
        )
    if exact:
        _require_same_routing(saved, own, folder)


def _size(shapes: Sequence[Shape], others: Sequence[Shape]) -> str:
    """In words; of several experts their sum, since another class may hold them in
    one.
    """
    if len(shapes) == len(others) == 1:
        return f"shape {shapes[0]}"
    return f"{sum(map(math.prod, shapes))} elements"


def _require_same_routing(saved: Digest, own: Table, folder: str) -> None:
    """Raise a DigestError where a parameter's state is another optimizer's than in this
    run.
    """
    then = _owners(saved["parameters"])
    now = _owners(own)
    changed = sorted(name for name in now if then.get(name, now[name]) != now[name])
    if not changed:
        return
    first = changed[0]
    more = f"; {len(changed) - 1} more have changed" if len(changed) > 1 else ""
    patterns: list[str] = []
    for field in ("muon_include", "muon_exclude"):
        option = ROWS[field].flags[0].option
        of_save = saved["settings"].get(field) or ()
        patterns += [f"{option} '{pattern}'" for pattern in of_save]
    raise DigestError(
        f"{folder} was saved with another routing: {first} was {then[first]}'s and is "
        f"{now[first]}'s in this run{more}. Give {named('muon_include')} and "
        f"{named('muon_exclude')} as at the save, which had "
        f"{' '.join(patterns) or 'neither'}. To go on with another routing, load it "
        "with --optimizer adam --adamw-from-muon, save, and load that with "
        "--muon-from-adamw momentum (docs/routing.md has the commands), or load the "
        "model alone (--no-load-optim)"
    )


def _own_part(trained: TrainedModel | None) -> Table:
    """The parameters that this rank speaks for."""
    if trained is None or trained.stage.instance > 0:
        return {}
    stage = trained.stage
    # EP ranks have different experts; one expert-DP rank speaks for its replicas
    speakers = [dist.get_rank()] if stage.ep is None else world_ranks(stage.ep)
    if world_rank(0, stage.group) not in speakers:
        return {}
    chunks = trained.model_chunks()
    ep_rank = 0 if stage.ep is None else stage.ep.rank()
    experts = local_experts(chunks, stage.sizes.ep)
    table: Table = {}
    for weight in weights(chunks, stage.sizes):
        if weight.is_tied_copy:
            continue  # only some stages have it
        table[expert_name(weight.name, ep_rank, experts)] = {
            "shape": _whole_shape(weight, stage.sizes.ep),
            "optimizer": _optimizer_of(weight, trained.config),
        }
    return table


def _optimizer_of(weight: Weight, config: MuonConfig) -> str:
    if not weight.param.requires_grad:
        return "frozen"
    return "muon" if why_adamw(weight, config) is None else "adamw"


def _whole_shape(weight: Weight, ep_size: int) -> list[int]:
    shape = list(weight.param.shape)
    # all experts in one, over EP and TP in the same dim
    if weight.is_module("GroupedMLP"):
        shape[1 if weight.name.endswith("weight1") else 0] *= weight.tp_size * ep_size
        return shape
    try:
        dim = partition_dim_of(weight)
    except NotImplementedError:  # an expert's weight that is not Muon's
        marked = getattr(weight.param, "tensor_model_parallel", False)
        dim = int(getattr(weight.param, "partition_dim", 0)) if marked else None
    if dim is not None and dim < len(shape):
        shape[dim] *= weight.tp_size
    return shape


def _owners(table: Table) -> dict[str, str]:
    """The optimizer of each trained parameter, by a name that experts of a layer may
    share.
    """
    owners: dict[str, set[str]] = {}
    for name, entry in table.items():
        if entry["optimizer"] != "frozen":
            owners.setdefault(_one_name(name), set()).add(
                _OPTIMIZERS[entry["optimizer"]]
            )
    return {name: " and ".join(sorted(each)) for name, each in owners.items()}


def _one_name(name: str) -> str:
    """The name of a weight whatever its class is."""
    for pattern, text in _SAME:
        name = pattern.sub(text, name)
    return name


def _sizes(table: Table) -> dict[str, list[Shape]]:
    """Shapes of matrices by one name, which experts of a layer may share.

    Vectors and convolutions are not compared: how TP splits some of them is not known.
    """
    sizes: dict[str, list[Shape]] = {}
    for name, entry in table.items():
        if len(entry["shape"]) == 2:
            sizes.setdefault(_one_name(name), []).append(tuple(entry["shape"]))
    return sizes
