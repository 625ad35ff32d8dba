"""Parameter groups with rates and decays of their own: ``lr_mults``, ``wd_mults`` and,
in ``by_pattern``, ``lr``, ``min_lr`` and ``weight_decay``.

Megatron's own groups are cut further, so its schedule, logs and checkpoints treat the
parts as they treat any group. A group is cut alike on every rank, where some of its
parts have no parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.mcore.host.process_groups import group_of, is_moe, local_experts
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.mcore.routing.param_routing import (
    GROUP_SETTINGS,
    LR_MULTIPLIER,
    Weight,
    last_of,
    names_of,
    weights,
)
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.runtime.collectives import all_gather_json
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.patterns import OF_GROUPS, only, read, settings_of, written

Group = dict[str, Any]
# Factors of the learning rate and of the weight decay; settings in their place.
OfGroup = tuple[float, float, str]

_NONE: OfGroup = (1.0, 1.0, "")
# Settings that a factor would multiply, by the setting that has the factor.
_FACTORS = {"lr_mults": ("lr", "min_lr"), "wd_mults": ("weight_decay",)}


def of_group(weight: Weight, names: Sequence[str], config: MuonConfig) -> OfGroup:
    """What a weight's parameter group has; of each number the last pattern counts.

    ``names`` has experts numbered over all EP ranks. A ValueError where a setting and a
    factor of it are given.
    """
    settings = only(written(settings_of(config.by_pattern, names)), OF_GROUPS)
    factors = []
    for field, keys in _FACTORS.items():
        pattern, factor = last_of(weight, getattr(config, field), 1.0)
        factors.append(float(factor))
        if pattern and only(settings, keys):
            raise ValueError(
                f"{names[0]} has {only(settings, keys)} by {named('by_pattern')} and a "
                f"factor by {named(field)}: use only one of the two"
            )
    lr_mult, wd_mult = factors
    return lr_mult, wd_mult, settings


def with_multipliers(
    original: Callable[..., list[Group]],
    config: MuonConfig,
    weight_decay: float,
    pg_collection: Any = None,
) -> Callable[..., list[Group]]:
    """Megatron's ``_get_param_groups`` with further groups; every rank of the world
    calls it.

    ``weight_decay`` is the run's.
    """

    def groups_of(
        model_chunks: Sequence[torch.nn.Module], *args: Any, **kwargs: Any
    ) -> list[Group]:
        groups = original(model_chunks, *args, **kwargs)
        device = device_of(model_chunks)
        of = together(
            lambda: _settings(model_chunks, config, pg_collection), None, device
        )
        everywhere = _everywhere(groups, of)
        return together(
            lambda: _cut(groups, of, everywhere, weight_decay), None, device
        )

    return groups_of


def _settings(
    model_chunks: Sequence[torch.nn.Module], config: MuonConfig, pg_collection: Any
) -> dict[torch.nn.Parameter, OfGroup]:
    ep_rank = 0
    experts = 0
    if config.by_pattern and is_moe(model_chunks):
        ep = group_of("ep", pg_collection)
        ep_rank = ep.rank()
        experts = local_experts(model_chunks, ep.size())
    return {
        weight.param: of_group(weight, names_of(weight, ep_rank, experts), config)
        for weight in weights(model_chunks)
    }


def _everywhere(
    groups: Sequence[Group], of: Mapping[torch.nn.Parameter, OfGroup]
) -> set[tuple[str, OfGroup]]:
    """What the parameters of each group have, on any rank."""
    held: set[tuple[str, OfGroup]] = set()
    for group in groups:
        held |= {(_key(group), of[param]) for param in group["params"]}
    everywhere: set[tuple[str, OfGroup]] = set()
    for part in all_gather_json(sorted(held), None):
        everywhere |= {(key, tuple(some)) for key, some in part}
    return everywhere


def _cut(
    groups: Sequence[Group],
    of: Mapping[torch.nn.Parameter, OfGroup],
    everywhere: set[tuple[str, OfGroup]],
    weight_decay: float,
) -> list[Group]:
    """Groups of one kind each; others than Megatron's come first.

    Before core 0.16, Megatron logs the rate of the last group.
    """
    made = []
    for group in groups:
        some = {held for key, held in everywhere if key == _key(group)} - {_NONE}
        for held in (*sorted(some), _NONE):
            params = [param for param in group["params"] if of[param] == held]
            part = {**group, "params": params}
            lr, decay, settings = held
            _multiply(part, lr, decay)
            if settings:
                _set(part, settings, weight_decay)
            made.append(part)
    return made


def _key(group: Group) -> str:
    """All of a group but its parameters."""
    return json.dumps({key: group[key] for key in sorted(group) if key != "params"})


def _multiply(group: Group, lr: float, decay: float) -> None:
    if decay != 1.0:
        group["wd_mult"] *= decay
    if lr == 1.0:
        return
    group[LR_MULTIPLIER] = lr
    if megatron_version()[1] < (0, 16):
        group["lr_mult"] *= lr
        return
    # of the schedule, which does not read lr_mult any more
    for rate in ("max_lr", "min_lr"):
        if group.get(rate) is not None:
            group[rate] *= lr
    group["default_config"] = False  # not the rate that Megatron logs


def _set(group: Group, text: str, weight_decay: float) -> None:
    """Give the group settings in place of the run's, which Megatron's schedule
    reads.
    """
    settings = read(text)
    group[GROUP_SETTINGS] = text
    if "weight_decay" in settings and group["wd_mult"] != 0.0:
        _decay(group, settings["weight_decay"], weight_decay)
    rates = only(text, ("lr", "min_lr"))
    if not rates:
        return
    group["lr_mult"] = 1.0
    group["max_lr"] = settings.get("lr", group.get("max_lr"))
    group["min_lr"] = settings.get("min_lr", group.get("min_lr"))
    if megatron_version()[1] >= (0, 16):
        group["default_config"] = False
    if (group["min_lr"] or 0.0) > (group["max_lr"] or 0.0):
        raise ValueError(
            f"{named('by_pattern')} {rates}: the minimum, {group['min_lr']}, is above "
            f"the rate, {group['max_lr']}, beside the run's --lr and --min-lr: give "
            "both lr and min_lr"
        )


def _decay(group: Group, decay: float, of_run: float) -> None:
    if megatron_version()[1] >= (0, 16):
        group.update(wd_mult=1.0, start_wd=decay, end_wd=decay)
    elif of_run > 0.0 or decay == 0.0:
        # its schedule knows the run's decay and a factor
        group["wd_mult"] = decay / of_run if decay else 0.0
    else:
        raise ValueError(
            f"{named('by_pattern')} weight_decay={decay} with --weight-decay 0 needs "
            "core 0.16 or newer: give the run a decay, and 0 to a pattern for the rest"
        )
