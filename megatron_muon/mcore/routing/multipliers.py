"""Parameter groups with rates and decays of their own: ``lr_mults`` and ``wd_mults``.

Megatron's own groups are cut further, so its schedule, logs and checkpoints treat the
parts as they treat any group. A group is cut alike on every rank, where some of its
parts have no parameters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.mcore.routing.param_routing import (
    LR_MULTIPLIER,
    Weight,
    matching,
    weights,
)
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.runtime.collectives import all_gather_json
from megatron_muon.settings.config import MuonConfig

Group = dict[str, Any]
Multipliers = tuple[float, float]  # of the learning rate, of the weight decay

_ONE: Multipliers = (1.0, 1.0)


def multipliers_of(weight: Weight, config: MuonConfig) -> Multipliers:
    """The factors of a weight's learning rate and weight decay; the last pattern
    counts.
    """
    lr_mult, wd_mult = (
        last_of(weight, pairs) for pairs in (config.lr_mults, config.wd_mults)
    )
    return (
        1.0 if lr_mult is None else lr_mult,
        1.0 if wd_mult is None else wd_mult,
    )


def last_of(weight: Weight, pairs: Sequence[tuple[str, float]]) -> float | None:
    """The number of the last pattern that matches; None where none does."""
    numbers = [
        float(number) for pattern, number in pairs if matching(weight, [pattern])
    ]
    return numbers[-1] if numbers else None


def with_multipliers(
    original: Callable[..., list[Group]], config: MuonConfig
) -> Callable[..., list[Group]]:
    """Megatron's ``_get_param_groups`` with further groups; every rank of the world
    calls it.
    """

    def groups_of(
        model_chunks: Sequence[torch.nn.Module], *args: Any, **kwargs: Any
    ) -> list[Group]:
        of = {
            weight.param: multipliers_of(weight, config)
            for weight in weights(model_chunks)
        }
        return _cut(original(model_chunks, *args, **kwargs), of)

    return groups_of


def _cut(
    groups: Sequence[Group], of: Mapping[torch.nn.Parameter, Multipliers]
) -> list[Group]:
    """Groups with one pair of multipliers each; multiplied groups come first.

    Before core 0.16, Megatron logs the rate of the last group.
    """
    held: set[tuple[str, float, float]] = set()
    for group in groups:
        held |= {(_key(group), *of[param]) for param in group["params"]}
    everywhere: set[tuple[str, float, float]] = set()
    for part in all_gather_json(sorted(held), None):
        everywhere |= {(key, lr, decay) for key, lr, decay in part}
    made = []
    for group in groups:
        pairs = {(lr, decay) for key, lr, decay in everywhere if key == _key(group)} - {
            _ONE
        }
        for pair in (*sorted(pairs), _ONE):
            params = [param for param in group["params"] if of[param] == pair]
            made.append(_multiplied({**group, "params": params}, *pair))
    return made


def _key(group: Group) -> str:
    """All of a group but its parameters."""
    return json.dumps({key: group[key] for key in sorted(group) if key != "params"})


def _multiplied(group: Group, lr: float, decay: float) -> Group:
    if decay != 1.0:
        group["wd_mult"] *= decay
    if lr == 1.0:
        return group
    group[LR_MULTIPLIER] = lr
    if megatron_version()[1] < (0, 16):
        group["lr_mult"] *= lr
        return group
    # of the schedule, which does not read lr_mult any more
    for rate in ("max_lr", "min_lr"):
        if group.get(rate) is not None:
            group[rate] *= lr
    group["default_config"] = False  # not the rate that Megatron logs
    return group
