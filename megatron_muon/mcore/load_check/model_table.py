"""The parameters of a model by names and shapes that do not depend on its parallelism."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.mcore.load_check.digest import DigestError, first_names
from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    partition_dim_of,
    weights,
    whole_shape,
    why_adamw,
)
from megatron_muon.mcore.routing.splits import fused_of, split_of, split_of_legacy_experts
from megatron_muon.mcore.wiring.buffers.placement import local_experts
from megatron_muon.mcore.wiring.process_groups import Sizes, Stage
from megatron_muon.settings.config import MuonConfig

Table = dict[str, dict[str, Any]]

# The names of one weight in different classes that torch_dist loads into one another: three of
# experts, and Transformer Engine's fused MLP. (Norms have many more; only matrices are compared.)
_SAME = (
    (re.compile(r"\.experts\.local_experts\.\d+\.(linear_fc[12])\."), r".experts.\1."),
    (re.compile(r"\.experts\.(linear_fc[12])\.weight\d+$"), r".experts.\1.weight"),
    (re.compile(r"\.experts\.weight([12])$"), r".experts.linear_fc\1.weight"),
    (re.compile(r"\.mlp\.1\.basic_ops\.0\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.3\.basic_ops\.0\."), ".mlp.linear_fc2."),
)
_VOCABULARY = re.compile(r"(^|\.)(word_embeddings|output_layer)\.weight$")


def table_of(model_chunks: Sequence[Any], config: MuonConfig, stage: Stage) -> Table:
    """``parameters`` of a digest, for the parameters of this rank. No communication.

    Args:
        model_chunks: this rank's model chunks.
        config: decides which weights are Muon's.
        stage: this rank's stage.
    """
    ep_rank = 0 if stage.ep is None else stage.ep.rank()
    sizes = stage.sizes
    experts = local_experts(model_chunks, sizes.ep)
    table = {}
    for weight in weights(model_chunks):
        if weight.is_tied_copy:
            continue  # only some stages have it
        whose = "muon" if why_adamw(weight, sizes.tp_of(weight), config) is None else "adamw"
        table[expert_name(weight.name, ep_rank, experts)] = {
            "shape": _whole_shape(weight, sizes),
            "optimizer": whose if weight.param.requires_grad else "frozen",
            **(_split(weight, sizes, config) if whose == "muon" else {}),
        }
    return table


def _split(weight: Weight, sizes: Sizes, config: MuonConfig) -> dict[str, str]:
    """The kind of split of a weight that can have several; else nothing."""
    if weight.is_module("GroupedMLP"):
        gated = weight.name.endswith("weight1") and weight.model_config.gated_linear_unit
        return {"split": split_of_legacy_experts(weight, config, gated=True)} if gated else {}
    fused = fused_of(weight, whole_shape(weight, sizes.tp_of(weight))[0])
    return {} if fused is None else {"split": split_of(weight, config, fused)}


def changed_splits(saved: Table, own: Table) -> list[str]:
    """A phrase for each change of split: the module, both kinds and the number of weights.

    Args:
        saved: ``parameters`` of the checkpoint's digest; one without splits is of an older plugin.
        own: ``parameters`` of the model that is to be loaded.
    """
    changes = Counter(
        (name.rsplit(".", 2)[-2], then, now)
        for name in sorted(saved.keys() & own.keys())
        for then, now in [(saved[name].get("split"), own[name].get("split"))]
        if then is not None and now is not None and then != now
    )
    return [
        f"{leaf} {then} there and {now} here ({count} weight(s))"
        for (leaf, then, now), count in changes.items()
    ]


def _whole_shape(weight: Weight, sizes: Sizes) -> list[int]:
    shape, tp_size = list(weight.param.shape), sizes.tp_of(weight)
    if weight.is_module("GroupedMLP"):  # all experts in one, over EP and TP in the same dim
        shape[1 if weight.name.endswith("weight1") else 0] *= tp_size * sizes.ep
        return shape
    dim = _split_dim(weight)
    if dim is not None and dim < len(shape):
        shape[dim] *= tp_size
    return shape


def _split_dim(weight: Weight) -> int | None:
    try:
        return partition_dim_of(weight)
    except NotImplementedError:  # an expert's weight that is not Muon's
        marked = getattr(weight.param, "tensor_model_parallel", False)
        return int(getattr(weight.param, "partition_dim", 0)) if marked else None


@dataclass(frozen=True, slots=True)
class _Sum:
    """Matrices that are compared as one: those of all experts of a layer, or a single one."""

    names: list[str]
    numel: int
    shape: tuple[int, ...]  # the first one's


def check_model(
    saved: Table, own: Table, folder: str, exact: bool, vocabularies: tuple[int | None, int | None]
) -> None:
    """Refuse a checkpoint of another model.

    Args:
        saved: ``parameters`` of the checkpoint's digest.
        own: ``parameters`` of the model that is to be loaded, from all ranks.
        folder: the checkpoint's folder, for errors.
        exact: the checkpoint may have no parameter that the model lacks.
        vocabularies: tokens before padding, saved and own. If both are known, they are compared
            instead of the padded sizes, which depend on TP.

    Raises:
        DigestError: names the first parameter that differs.
    """
    then, now = _summed(saved), _summed(own)
    missing = [now[name].names[0] for name in now if name not in then]
    unknown = [then[name].names[0] for name in then if name not in now]
    if missing:
        raise DigestError(
            f"{folder} is of another model: it has no {first_names(missing)}, which this model has"
        )
    if unknown and exact:
        raise DigestError(
            f"{folder} is of another model: it has {first_names(unknown)}, which this model has not"
        )
    both_known = None not in vocabularies
    if both_known and vocabularies[0] != vocabularies[1]:
        raise DigestError(
            f"{folder} is of another model: its vocabulary has {vocabularies[0]} tokens, that of "
            f"this run {vocabularies[1]} (before padding); word_embeddings.weight goes by it"
        )
    for name in sorted(now):
        if both_known and _VOCABULARY.search(name):
            continue
        _check_size(then[name], now[name], folder)


def _check_size(then: _Sum, now: _Sum, folder: str) -> None:
    name, several = now.names[0], max(len(then.names), len(now.names)) > 1
    there, here = (then.numel, now.numel) if several else (then.shape, now.shape)
    if there != here:
        what = f"{name} and what goes with it have elements:" if several else f"{name} is"
        raise DigestError(
            f"{folder} is of another model: {what} {there} there and {here} here, counted over "
            "all ranks"
        )


def _summed(table: Mapping[str, Mapping[str, Any]]) -> dict[str, _Sum]:
    """Matrices by canonical name; without vectors, since TP may split some in an unknown way."""
    sums: dict[str, _Sum] = {}
    for name in sorted(table):
        shape = tuple(table[name]["shape"])
        if len(shape) < 2:
            continue
        canonical = name
        for pattern, text in _SAME:
            canonical = pattern.sub(text, canonical)
        before = sums.get(canonical, _Sum([], 0, shape))
        sums[canonical] = _Sum([*before.names, name], before.numel + math.prod(shape), before.shape)
    return sums
