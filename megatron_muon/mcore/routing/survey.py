"""A model's routing over all pipeline stages in a few lines, before the first step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from megatron_muon.mcore.host.process_groups import Sizes, Stage
from megatron_muon.mcore.routing.attention import is_unknown_fusion
from megatron_muon.mcore.routing.param_routing import (
    EMBEDDING_OR_OUTPUT,
    MARKED,
    NOT_IN_TABLE,
    is_matched,
    of_any_number,
    weights,
    whole_shape,
)
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.planning.describe import UNSPLIT, Share, share_lines
from megatron_muon.runtime import collectives
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import MuonConfig, named


def survey(
    model_chunks: Sequence[Any],
    routes: Sequence[Route],
    config: MuonConfig,
    stage: Stage,
) -> list[str]:
    """Check the patterns and count the elements of the whole model. Every rank of the
    world calls.

    Returns:
        Lines for this rank to print. On rank 0 they are about the model, on the first
        rank of a stage about the stage's weights of unknown modules.

    Raises:
        ValueError: a pattern matches no parameter of any stage, or Muon has none of the
            model.
    """

    def own() -> str:  # it may fail on some stages only
        matched = sorted(matched_patterns(model_chunks, stage.sizes, config))
        return (
            json.dumps([matched, asdict(share_of(routes, config))])
            if stage.speaks
            else ""
        )

    texts = collectives.all_gather_texts(together(own, None, stage.device), None)
    stages = [json.loads(text) for text in texts if text]
    patterns: set[str] = set()
    for matched, _ in stages:
        patterns.update(matched)
    require_matched(patterns, config)
    of_model = share_lines(sum((Share(**share) for _, share in stages), start=Share()))
    lines = unknown_lines(routes) if stage.speaks else []
    return [*of_model, *lines] if dist.get_rank() == 0 else lines


def matched_patterns(
    model_chunks: Sequence[Any], sizes: Sizes, config: MuonConfig
) -> set[str]:
    """Those of ``config.patterns`` that have an effect on these chunks."""
    every = list(weights(model_chunks)) if config.patterns else []
    return {
        pattern
        for pattern in config.patterns
        if any(
            is_matched(weight, pattern, weight.tp_size(sizes), config)
            for weight in every
        )
    }


def require_matched(matched: Collection[str], config: MuonConfig) -> None:
    """Refuse, by a ValueError, one of ``config.patterns`` that matched on no stage."""
    for pattern in config.patterns:
        if pattern not in matched:
            splits = any(pattern == split for split, _ in config.splits)
            whose = "Muon's" if splits else "the model"
            raise ValueError(
                f"{pattern!r} in {config.setting_of(pattern)} matches no parameter of "
                f"{whose}; `megatron-muon routes` prints their names, which do not "
                "start with 'module.'"
            )


def share_of(routes: Sequence[Route], config: MuonConfig) -> Share:
    """The share of a pipeline stage, each element once over all its ranks."""
    counts = Counter[str]()
    kept = Counter[str]()
    for route in routes:
        weight, elements = route.weight, route.elements
        if weight.is_tied_copy:
            continue
        active = elements
        if weight.is_expert:
            model = weight.model_config
            active = int(elements * model.moe_router_topk // model.num_moe_experts)
        counts.update(total=elements, active=active)
        if route.muon is not None:
            counts.update(muon=elements, active_muon=active)
        elif weight.param.dim() == 2:
            kept[_kind(route)] += elements
    muons = [route for route in routes if route.muon is not None]
    whole = {
        each.weight.leaf for each in muons if each.muon and len(each.muon.matrices) == 1
    }
    unsplit = [leaf for leaf in UNSPLIT if leaf in whole]
    fusions = _fusions(muons, config)
    return Share(**counts, kept=dict(kept), unsplit=unsplit, unknown_fusions=fusions)


def _kind(route: Route) -> str:
    """What a 2-D weight of AdamW's is: the class of its module, and why."""
    if route.why_adamw == EMBEDDING_OR_OUTPUT:
        return "embeddings and the output layer"
    why = NOT_IN_TABLE if route.is_unknown else route.why_adamw
    return f"{type(route.weight.module).__name__} ({why})"


def _fusions(muons: Sequence[Route], config: MuonConfig) -> list[str]:
    """Fused projections that should be split, but whose order of rows is not known.

    One for all layers, with ``*`` for the layer's number; with the attention's class.
    """
    names: dict[str, None] = {}
    for route in muons if config.split_qkv else ():
        weight = route.weight
        if is_unknown_fusion(weight, whole_shape(weight, route.tp_size)[0]):
            holder = weight.holders[0] if weight.holders else weight.module
            names[f"{of_any_number(weight.name)} (in {type(holder).__name__})"] = None
    return list(names)


def unknown_lines(routes: Sequence[Route]) -> list[str]:
    """Lines that name matrices which AdamW keeps for no reason of their own, if any
    are.
    """
    kept = (
        (
            "Muon's table does not know the type of their module",
            lambda route: route.is_unknown,
        ),
        ("Megatron marks them use_muon=False", lambda route: route.why_adamw == MARKED),
    )
    return [
        f"[megatron_muon] AdamW keeps these matrices, since {why}: {', '.join(names)}. "
        f"Of 2-D ones {named('muon_include')} and {named('muon_exclude')} in "
        "MuonConfig decide."
        for why, is_kept in kept
        if (names := _names(filter(is_kept, routes)))
    ]


def _names(routes: Iterable[Route]) -> list[str]:
    """One for all layers or experts, with ``*`` for the number, and the module's
    class.
    """
    names: dict[str, None] = {}
    for weight in (route.weight for route in routes):
        batch = f", {weight.param.dim()}-D" if weight.param.dim() != 2 else ""
        names[
            f"{of_any_number(weight.name)} ({type(weight.module).__name__}{batch})"
        ] = None
    return list(names)
