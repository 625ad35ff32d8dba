"""muP (Megatron's ``use_mup``): rates by width, each applied once.

Megatron's ``get_mup_config_overrides`` gives AdamW's hidden matrices 1 / width of the
rate. Muon's need none, since ``unit_rms_norm`` is their scale by width. Megatron tells
Muon's matrices by a rule of its own; here they are those that Muon updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron_muon.mcore.host.process_groups import Chunks, group_sizes
from megatron_muon.mcore.routing.routes import muons_of, routes_of
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.patterns import pairs_of
from megatron_muon.settings.rules import MATCHED, own_rule, row_of

Overrides = Mapping[Any, Any]  # Megatron's settings of parameters, by its keys
_OF_MUP = "mup_"  # its predicates' names begin so


def adamws_overrides(
    overrides: Overrides, model_chunks: Chunks, config: MuonConfig, pg_collection: Any
) -> dict[Any, Any]:
    """Megatron's overrides, with muP's for all hidden matrices of AdamW's alone.

    Those that were made for AdamW, by another ``optimizer_type``, hold for Muon's
    matrices no more than those for Muon.

    Raises:
        ValueError: a scale mode grows with the width; or see ``routes_of``.
    """
    _require_scales(config)
    sizes = group_sizes(model_chunks[0], pg_collection)
    muons = muons_of(routes_of(model_chunks, sizes, config))
    found: dict[Any, Any] = {}
    for key, override in overrides.items():
        predicate: Any = getattr(key, "with_name_predicate", None)
        if getattr(predicate, "name", "").startswith(_OF_MUP):
            mine = _of_adamw(predicate, muons)
            key = dataclasses.replace(key, with_name_predicate=mine)
        found[key] = override
    return found


def _require_scales(config: MuonConfig) -> None:
    """Refuse scale modes whose updates change a layer's output more, the wider it
    is.
    """
    patterns = pairs_of(config.by_pattern)
    for one in (config, *(config.where(settings) for _, settings in patterns)):
        own = own_rule(one.rule)
        has_own_scale = own is not None and own.scale is not None
        is_free = has_own_scale or "scale_mode" in row_of(one.rule).refuses
        if one.scale_mode in MATCHED and not is_free:
            raise ValueError(
                f"use_mup with {named('scale_mode')} {one.scale_mode}: the change of a "
                "layer's output then grows with the width, so no rate carries over to "
                "another one: give unit_rms_norm"
            )


def _is_hidden(param: torch.nn.Parameter, name: str) -> bool:
    """Whether it is a matrix between two layers, which Megatron takes for Muon's."""
    is_embedding = "embedding" in name or getattr(param, "shared_embedding", False)
    is_end = getattr(param, "is_embedding_or_output_parameter", is_embedding)
    return param.dim() == 2 and not (is_embedding or is_end)


def _of_adamw(predicate: Any, muons: set[torch.nn.Parameter]) -> Any:
    """The predicate, which holds for what is AdamW's only here, and not for Muon's."""
    asked = predicate.fn

    def holds(param: torch.nn.Parameter, name: str) -> bool:
        is_asked = _is_hidden(param, name) or asked(param, name)
        return is_asked and param not in muons

    return dataclasses.replace(predicate, fn=holds)
