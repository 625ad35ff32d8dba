"""A model's routing over all pipeline stages in a few lines, before the first step."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_muon.mcore.routing.attention import is_unknown_fusion
from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.param_routing import (
    EMBEDDING_OR_OUTPUT,
    NOT_IN_TABLE,
    Weight,
    is_cut,
    is_matched,
    is_unknown,
    partition_dim_of,
    weights,
    whole_shape,
    why_adamw,
)
from megatron_muon.mcore.wiring.process_groups import Sizes, Stage
from megatron_muon.planning.describe import UNSPLIT, Share, fused_lines, share_lines
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import MuonConfig, named

_NUMBER = re.compile(r"\.\d+\.")


def survey(model_chunks: Sequence[Any], config: MuonConfig, stage: Stage) -> list[str]:
    """Check the patterns and count the elements of the whole model. Every rank of the world calls.

    Args:
        model_chunks: all of this rank's.
        config: the settings.
        stage: this rank's.

    Returns:
        Lines for this rank to print. On rank 0 they are about the model, on the first rank of a
        stage about the stage's weights of unknown modules.

    Raises:
        ValueError: a pattern matches no parameter of any stage, or Muon has none of the model.
    """
    patterns = config.patterns

    def _is_matched(weight: Weight, pattern: str) -> bool:
        return is_matched(weight, pattern, stage.sizes.tp_of(weight), config)

    def own() -> tuple[list[Weight], Share, list[int], list[str], list[str]]:
        """It may fail on some stages only, as with an expert's weight that no other stage has."""
        held = list(weights(model_chunks))
        share = share_of(held, config, stage.sizes)
        matched = [int(any(_is_matched(weight, p) for weight in held)) for p in patterns]
        here = unsplit(held, config, stage.sizes)
        return held, share, matched, here, unknown_fusions(held, config, stage.sizes)

    held, share, matched, here, fused = together(own, None, stage.device)
    first = collectives.world_rank(0, stage.group)  # a number that only the stage's ranks have
    counts = [*share.numbers(), *(int(leaf in here) for leaf in UNSPLIT), int(bool(fused))]
    mine = [stage.instance, first, *counts, *matched]
    every = collectives.all_gather_numbers(mine, None, stage.device)
    for index, pattern in enumerate(patterns, start=-len(patterns)):
        if not any(numbers[index] for numbers in every):
            raise ValueError(
                f"{pattern!r} in {config.setting_of(pattern)} matches no parameter of "
                f"{whose(pattern, config)}; `megatron-muon routes` prints their names"
            )
    lines = unknown_lines(held, config, stage.sizes) if stage.speaks else []
    at = 2 + len(counts) - 1
    fused = _of_all_stages(fused) if any(numbers[at] for numbers in every) else []
    stages = {key: numbers for instance, key, *numbers in every if instance == 0}
    shares = [Share.of(numbers[:4]) for numbers in stages.values()]
    anywhere = [any(flags) for flags in zip(*(n[4:] for n in stages.values()), strict=True)]
    whole = [leaf for leaf, found_ in zip(UNSPLIT, anywhere, strict=False) if found_]
    kept: list[dict[str, int]] = []
    if sum(shares, start=Share()).is_small:
        kept = _of_all_ranks(kept_by(held, config, stage.sizes) if stage.speaks else {})
    of_model = share_lines(shares, whole, kept)  # on every rank: it may raise
    return [*of_model, *fused_lines(fused), *lines] if dist.get_rank() == 0 else lines


def _of_all_ranks(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes by name of each rank of the world, all of which call."""
    texts = collectives.all_gather_texts(json.dumps(sizes), None)
    return [json.loads(text) for text in texts]


def kept_by(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> dict[str, int]:
    """Elements of a stage's 2-D weights that AdamW has, by class of module and why."""
    kept: Counter[str] = Counter()
    for weight in every:
        if weight.is_tied_copy or not weight.param.requires_grad or weight.param.dim() != 2:
            continue
        reason = why_adamw(weight, sizes.tp_of(weight), config)
        if reason is not None:
            known = not is_unknown(weight, sizes.tp_of(weight), config)
            kind = f"{type(weight.module).__name__} ({reason if known else NOT_IN_TABLE})"
            if reason == EMBEDDING_OR_OUTPUT:
                kind = "embeddings and the output layer"
            kept[kind] += _elements(weight, sizes, config)
    return dict(kept)


def whose(pattern: str, config: MuonConfig) -> str:
    """The parameters that one of ``config.patterns`` may match, for errors."""
    of_muon = any(pattern == split for split, _ in config.splits)
    return "Muon's" if of_muon else "the model"


def _of_all_stages(names: Sequence[str]) -> list[str]:
    """The different names of all ranks of the world, each of which calls."""
    texts = collectives.all_gather_texts("\n".join(names), None)
    return list(dict.fromkeys(name for text in texts for name in text.split("\n") if name))


def unsplit(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> list[str]:
    """The fused projections of ``describe.UNSPLIT`` that Muon takes as one matrix each."""
    leaves = {
        weight.leaf
        for weight in _muons_matrices(every, config, sizes)
        if weight.leaf in UNSPLIT and _is_one(weight, sizes, config)
    }
    return [leaf for leaf in UNSPLIT if leaf in leaves]


def _is_one(weight: Weight, sizes: Sizes, config: MuonConfig) -> bool:
    return len(matrices_of(weight, sizes.tp_of(weight), config).matrices[0]) == 1


def _muons_matrices(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> Iterator[Weight]:
    for weight in every:
        asked = weight.param.dim() == 2 and weight.param.requires_grad  # as share_of has
        if asked and why_adamw(weight, sizes.tp_of(weight), config) is None:
            yield weight


def share_of(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> Share:
    """Elements of a stage over all its ranks, each once.

    Args:
        every: all of a rank's weights.
        config: the settings.
        sizes: those of the stage's groups.

    Raises:
        ValueError, NotImplementedError: a weight cannot be routed.
    """
    total = muon = active = muon_active = 0
    for weight in every:
        if weight.is_tied_copy or not weight.param.requires_grad:
            continue
        is_muons = why_adamw(weight, sizes.tp_of(weight), config) is None
        elements = _elements(weight, sizes, config)
        used = _used(elements, weight)
        total += elements
        active += used
        muon += elements * is_muons
        muon_active += used * is_muons
    return Share(total, muon, active, muon_active)


def _elements(weight: Weight, sizes: Sizes, config: MuonConfig) -> int:
    """Elements of the whole parameter; of an expert's, with its likes on all EP ranks."""
    tp_size = sizes.tp_of(weight)
    ep_size = sizes.ep if weight.is_expert else 1
    if why_adamw(weight, tp_size, config) is None:
        replicated = matrices_of(weight, tp_size, config).partition_dim is None
    else:
        replicated = not is_cut(weight)
        if weight.param.dim() == 2 and not weight.is_expert:
            replicated = partition_dim_of(weight) is None
    return int(weight.param.numel()) * ep_size * (1 if replicated else tp_size)


def _used(elements: int, weight: Weight) -> int:
    """Elements that one token goes through."""
    if not weight.is_expert:
        return elements
    model = weight.model_config
    return int(elements * model.moe_router_topk // model.num_moe_experts)


def unknown_lines(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> list[str]:
    """A line that names the 2-D weights whose module type is not in Muon's table, if any is."""
    names = [
        f"{weight.name} ({type(weight.module).__name__})"
        for weight in every
        if weight.param.requires_grad and is_unknown(weight, sizes.tp_of(weight), config)
    ]
    if not names:
        return []
    return [
        "[megatron_muon] AdamW keeps these 2-D weights, since Muon's table does not know the type "
        f"of their module: {', '.join(names)}. {named('muon_include')} and "
        f"{named('muon_exclude')} in MuonConfig decide."
    ]


def unknown_fusions(every: Sequence[Weight], config: MuonConfig, sizes: Sizes) -> list[str]:
    """Muon's fused projections that should be split, but whose order of rows is not known.

    One for all layers, with ``*`` for the layer's number; with the attention's class.
    """
    if not config.split_qkv:
        return []
    names = {
        f"{_NUMBER.sub('.*.', weight.name)} (in {_holder(weight)})": None
        for weight in _muons_matrices(every, config, sizes)
        if is_unknown_fusion(weight, whole_shape(weight, sizes.tp_of(weight))[0])
    }
    return list(names)


def _holder(weight: Weight) -> str:
    """The class of the module that its linear is in."""
    return type(weight.holders[0] if weight.holders else weight.module).__name__
