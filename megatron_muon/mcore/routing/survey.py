"""A model's routing over all pipeline stages in a few lines, before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_muon.mcore.routing.attention import is_unknown_fusion
from megatron_muon.mcore.routing.param_routing import (
    EMBEDDING_OR_OUTPUT,
    MARKED,
    of_any_number,
    whole_shape,
)
from megatron_muon.mcore.routing.routes import Route
from megatron_muon.planning.describe import Share
from megatron_muon.settings.config import MuonConfig


def share_of(routes: Sequence[Route], config: MuonConfig) -> Share:
    """The share of a pipeline stage, each element once over all its ranks."""
    counts = Counter[str]()
    kept = Counter[str]()
    remarks: dict[str, None] = {}
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
            counts.update(muon=elements, active_muon=active)
        elif weight.param.dim() == 2:
            kept[_kind(route)] += elements
    return Share(**counts, kept=list(kept.items()), remarks=list(remarks))


def _kind(route: Route) -> str:
    """What a 2-D weight of AdamW's is: the class of its module, and why."""
    if route.why_adamw == EMBEDDING_OR_OUTPUT:
        return "embeddings and the output layer"
    return f"{type(route.weight.module).__name__} ({route.why_adamw})"


def remarks_on(route: Route, config: MuonConfig) -> Iterator[str]:
    """What is unusual about a weight; the same for all layers or experts, whose numbers
    are ``*``.
    """
    weight = route.weight
    name = of_any_number(weight.name)
    if route.muon is not None:
        if config.split_qkv and is_unknown_fusion(weight, whole_shape(weight)[0]):
            holder = weight.holder or weight.module
            yield (
                f"{name} (in {type(holder).__name__}) is one matrix, since the order "
                "of its rows is not known"
            )
    elif route.is_unknown or route.why_adamw == MARKED:
        yield f"AdamW keeps {name} ({route.why_adamw})"
