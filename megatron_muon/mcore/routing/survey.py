"""A model's routing over all pipeline stages in a few lines, before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from megatron_muon.mcore.host.process_groups import Chunks, Sizes
from megatron_muon.mcore.routing.attention import is_unknown_fusion
from megatron_muon.mcore.routing.param_routing import (
    EMBEDDING_OR_OUTPUT,
    MARKED,
    NOT_IN_TABLE,
    Weight,
    is_matched,
    of_any_number,
    weights,
    whole_shape,
)
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.planning.describe import (
    MARKED_ADAMW,
    NOT_SPLIT,
    UNKNOWN_MODULE,
    UNKNOWN_ROWS,
    Share,
    union_of,
)
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.patterns import OF_GROUPS, only

# Fused projections that may be one matrix each, by the name of their module.
UNSPLIT = {
    "linear_kv_down_proj": "multi-latent attention's projections",
    # with queries, from 0.19 on
    "linear_qkv_down_proj": "multi-latent attention's projections",
    "in_proj": "the in_proj of state-space layers",
}


def matched_patterns(
    model_chunks: Chunks, sizes: Sizes, config: MuonConfig
) -> set[str]:
    """The patterns of the settings that have an effect on these chunks."""
    every = list(weights(model_chunks, sizes)) if config.patterns else []

    def is_used(pattern: str, weight: Weight) -> bool:
        if pattern in config.by_pattern:
            from megatron_muon.mcore.routing.by_pattern import has_effect

            return has_effect(weight, pattern, sizes, config)
        return is_matched(weight, pattern, config)

    return {
        pattern
        for pattern in config.patterns
        if any(is_used(pattern, weight) for weight in every)
    }


def require_matched(matched: Collection[str], config: MuonConfig) -> None:
    """Refuse, by a ValueError, one of ``config.patterns`` that matched on no stage."""
    for pattern in config.patterns:
        if pattern not in matched:
            splits = any(pattern == split for split, _ in config.splits)
            settings = pattern.partition(":")[2] if pattern in config.by_pattern else ""
            of_muon = splits or settings != only(settings, OF_GROUPS)
            whose = "Muon's" if of_muon else "the model"
            raise ValueError(
                f"{pattern!r} in {config.setting_of(pattern)} matches no parameter of "
                f"{whose}; `megatron-muon routes` without it prints their names, which "
                "do not start with 'module.'; on a CPU give it --transformer-impl local"
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
    return Share(**counts, kept=dict(kept), names=names_of(routes, config))


def _kind(route: Route) -> str:
    """What a 2-D weight of AdamW's is: the class of its module, and why."""
    if route.why_adamw == EMBEDDING_OR_OUTPUT:
        return "embeddings and the output layer"
    why = NOT_IN_TABLE if route.is_unknown else route.why_adamw
    return f"{type(route.weight.module).__name__} ({why})"


def names_of(routes: Sequence[Route], config: MuonConfig) -> dict[str, list[str]]:
    """What is put into the sentences of ``describe`` about these weights.

    It is one name for all layers or experts, with ``*`` for the number, and a class.
    """
    names: dict[str, list[str]] = {}
    for route in routes:
        for sentence, name in _sentences_about(route, config):
            names.setdefault(sentence, []).append(name)
    return union_of([names])


def _sentences_about(route: Route, config: MuonConfig) -> Iterator[tuple[str, str]]:
    weight = route.weight
    name = of_any_number(weight.name)
    if route.muon is not None:
        if weight.leaf in UNSPLIT and len(route.muon.matrices) == 1:
            yield NOT_SPLIT, UNSPLIT[weight.leaf]
        if config.split_qkv and is_unknown_fusion(weight, whole_shape(weight)[0]):
            holder = weight.holders[0] if weight.holders else weight.module
            yield UNKNOWN_ROWS, f"{name} (in {type(holder).__name__})"
        return
    of = type(weight.module).__name__
    if weight.param.dim() != 2:
        of += f", {weight.param.dim()}-D"
    if route.is_unknown:
        yield UNKNOWN_MODULE, f"{name} ({of})"
    elif route.why_adamw == MARKED:
        yield MARKED_ADAMW, f"{name} ({of})"
