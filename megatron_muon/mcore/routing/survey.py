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
    UNKNOWN_MODULE,
    UNKNOWN_ROWS,
    Share,
)
from megatron_muon.settings.config import MuonConfig


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
            raise ValueError(
                f"{pattern!r} in {config.setting_of(pattern)} matches no parameter "
                "of the model, or none that it could change; `megatron-muon routes` "
                "without it prints their names, which do not start with 'module.'; on "
                "a CPU give it --transformer-impl local"
            )


def share_of(routes: Sequence[Route], config: MuonConfig) -> Share:
    """The share of a pipeline stage, each element once over all its ranks."""
    counts = Counter[str]()
    kept = Counter[str]()
    remarks: dict[tuple[str, str], None] = {}
    for route in routes:
        remarks |= dict.fromkeys(remarks_on(route, config))
        weight, elements = route.weight, route.elements
        if weight.is_tied_copy:
            continue
        active = elements
        if weight.is_expert:
            model = weight.model_config
            active = int(elements * model.moe_router_topk // model.num_moe_experts)
        counts.update(total=elements, active=active)
        if route.muon is not None:
            counts.update(muon=elements)
        elif weight.param.dim() == 2:
            kept[_kind(route)] += elements
    return Share(**counts, kept=dict(kept), remarks=tuple(remarks))


def _kind(route: Route) -> str:
    """What a 2-D weight of AdamW's is: the class of its module, and why."""
    if route.why_adamw == EMBEDDING_OR_OUTPUT:
        return "embeddings and the output layer"
    why = NOT_IN_TABLE if route.is_unknown else route.why_adamw
    return f"{type(route.weight.module).__name__} ({why})"


def remarks_on(route: Route, config: MuonConfig) -> Iterator[tuple[str, str]]:
    """What is unusual about a weight: a sentence of ``describe``, and what is put into
    it: one name for all layers or experts, with ``*`` for the number, and a class.
    """
    weight = route.weight
    name = of_any_number(weight.name)
    if route.muon is not None:
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
