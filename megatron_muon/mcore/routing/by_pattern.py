"""``by_pattern`` on a model: which weights have settings of their own, and whether they
can.

Patterns are compared with names as ``megatron-muon routes`` prints them: experts are
numbered over all EP ranks, and a matrix in a fused weight is in brackets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_muon.mcore.host.process_groups import Sizes
from megatron_muon.mcore.routing.matrices import (
    matrices_of,
    numbered,
    require_scale_mode,
)
from megatron_muon.mcore.routing.param_routing import Weight, is_muons, names_of
from megatron_muon.planning.layout import Parameter
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.patterns import (
    OF_GROUPS,
    fits,
    only,
    pairs_of,
    settings_of,
    written,
)


def has_effect(weight: Weight, text: str, sizes: Sizes, config: MuonConfig) -> bool:
    """Whether one of ``by_pattern`` sets anything for a weight, on any EP rank."""
    ((pattern, settings),) = pairs_of((text,))
    if only(settings, OF_GROUPS) == settings:
        return any(fits(pattern, names) for names, _, _ in _names(weight, sizes))
    if not is_muons(weight, config):
        return False
    muon = matrices_of(weight, config)
    return any(
        fits(pattern, names, part)
        for names, ep_rank, experts in _names(weight, sizes)
        for part in _parts(muon, names[0], ep_rank, experts)
    )


def require_usable(
    weight: Weight, muon: Parameter, sizes: Sizes, config: MuonConfig
) -> None:
    """Refuse, by a ValueError or NotImplementedError that names it, what a weight of
    Muon's cannot have.
    """
    for names, ep_rank, experts in _names(weight, sizes):
        for part in _parts(muon, names[0], ep_rank, experts):
            _require_whole(names, part, config)
            settings = settings_of(config.by_pattern, names, part)
            if settings != settings_of(config.by_pattern, names[:1], part):
                raise ValueError(
                    f"{named('by_pattern')} matches {' or '.join(names[1:])}, and "
                    f"{names[0]} is the same weight: give a pattern for both names"
                )
            try:
                require_scale_mode(weight, config.where(written(settings)))
            except ValueError as error:
                raise ValueError(f"{names[0]}: {error}") from error


def _require_whole(names: list[str], part: str, config: MuonConfig) -> None:
    for pattern, settings in pairs_of(config.by_pattern):
        of_part = fits(pattern, names, part) and not fits(pattern, names)
        if of_part and only(settings, OF_GROUPS):
            raise ValueError(
                f"{named('by_pattern')} {pattern}: {only(settings, OF_GROUPS)} is of "
                f"whole parameters, and the pattern matches {part!r} of {names[0]}: "
                "leave out the brackets"
            )


def _names(weight: Weight, sizes: Sizes) -> Iterator[tuple[list[str], int, int]]:
    """A weight's names on each EP rank, the EP rank, and its number of experts."""
    experts = getattr(weight.model_config, "num_moe_experts", None) or 0
    local = experts // sizes.ep
    for ep_rank in range(sizes.ep if weight.is_expert else 1):
        yield names_of(weight, ep_rank, local), ep_rank, local


def _parts(muon: Parameter, name: str, ep_rank: int, experts: int) -> set[str]:
    """What is in brackets behind the name of a parameter on an EP rank; empty for one
    matrix.
    """
    here = replace(muon, name=name)
    return {here.part_of(numbered(m, ep_rank, experts)) for m in muon.matrices}
