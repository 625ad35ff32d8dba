"""The routes of a model: to Muon, as which matrices, or to AdamW, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from megatron_muon.mcore.host.process_groups import Chunks, Sizes
from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.param_routing import (
    NOT_IN_TABLE,
    Weight,
    is_cut,
    is_muons,
    weights,
    why_adamw,
)
from megatron_muon.planning.layout import Parameter
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.patterns import fits


@dataclass(frozen=True, slots=True)
class Route:
    """Where a parameter goes."""

    weight: Weight  # the parameter, with its name and module
    # of the whole parameter; of an expert's, with its likes on all EP ranks
    elements: int
    # its matrices, without a place in a grad buffer; None: AdamW's
    muon: Parameter | None
    why_adamw: str | None  # the reason, where it is AdamW's

    @property
    def is_unknown(self) -> bool:
        """Matrices that are AdamW's only because their module type is not in the
        table.
        """
        return self.why_adamw is not None and self.why_adamw.endswith(NOT_IN_TABLE)


def routes_of(model_chunks: Chunks, sizes: Sizes, config: MuonConfig) -> list[Route]:
    """The routes of all of a rank's parameters that train, in Megatron's order; errors
    name one.
    """
    every = weights(model_chunks, sizes)
    return [_route(w, sizes, config) for w in every if w.param.requires_grad]


def _route(weight: Weight, sizes: Sizes, config: MuonConfig) -> Route:
    why = why_adamw(weight, config)
    muon = matrices_of(weight, config) if why is None else None
    if muon is not None and config.by_pattern:
        from megatron_muon.mcore.routing.by_pattern import require_usable

        require_usable(weight, muon, sizes, config)
    is_spread = is_cut(weight) if muon is None else muon.partition_dim is not None
    likes = sizes.ep if weight.is_expert else 1
    if is_spread:
        likes *= weight.tp_size
    return Route(weight, int(weight.param.numel()) * likes, muon, why)


def muons_of(routes: Iterable[Route]) -> set[torch.nn.Parameter]:
    """The parameters that are Muon's."""
    return {route.weight.param for route in routes if route.muon is not None}


def matched_patterns(
    model_chunks: Chunks, sizes: Sizes, config: MuonConfig
) -> set[str]:
    """The patterns of the settings that have an effect on these chunks."""
    every = list(weights(model_chunks, sizes)) if config.patterns else []
    of_muons = dict(config.splits + config.radii)

    def is_used(pattern: str, weight: Weight) -> bool:
        if pattern in config.by_pattern:
            from megatron_muon.mcore.routing.by_pattern import has_effect

            return has_effect(weight, pattern, sizes, config)
        if not fits(pattern, weight.names):
            return False
        return pattern not in of_muons or is_muons(weight, config)

    return {
        pattern
        for pattern in config.patterns
        if any(is_used(pattern, weight) for weight in every)
    }


def require_matched(matched: Collection[str], config: MuonConfig) -> None:
    """Refuse, by a ValueError, one of ``config.patterns`` that matched on no stage."""
    for pattern, setting in config.patterns.items():
        if pattern not in matched:
            raise ValueError(
                f"{pattern!r} in {setting} matches no parameter "
                "of the model, or none that it could change; `megatron-muon routes` "
                "without it prints their names, which do not start with 'module.'; on "
                "a CPU give it --transformer-impl local"
            )
