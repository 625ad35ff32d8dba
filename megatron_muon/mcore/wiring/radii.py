"""The radii of the rule hyperball in a run: found before the first step, saved,
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.console import first_names
from megatron_muon.mcore.routing.param_routing import expert_name, last_of
from megatron_muon.rules.hyperball import LEAST_NORM, Radii, norms_at_start
from megatron_muon.runtime.collectives import Group, all_gather_json
from megatron_muon.runtime.consensus import together
from megatron_muon.settings.config import MuonConfig, named

_MOST = 1 / LEAST_NORM  # whose square fp32 has, too


class RunRadii:
    """The radii of all matrices of a run, the same on every rank.

    Args:
        parts: Megatron's optimizers, with Muon inside.
        config: the settings of the run.
        group, device: the ranks that step together, None for the world, and this
            rank's device. A rank where nothing trains loads nothing, and would not know
            that others did.

    Attributes:
        known: the radii, as they are saved; None before the first step, and after a
            load without any.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        config: MuonConfig,
        group: Group | None,
        device: torch.device,
    ) -> None:
        self._parts = [part for part in parts if not part.is_stub_optimizer]
        self._config = config
        self._group, self._device = group, device
        self._are_in_use = False
        self.known: Radii | None = None

    def require_usable(self, saved: object) -> None:
        """Raise ValueError where a file, which may hold anything, has no radii."""
        is_usable = isinstance(saved, dict) and all(
            isinstance(name, str) and type(radius) is float and _is_usable(radius)
            for name, radius in saved.items()
        )
        if saved is not None and not is_usable:
            raise ValueError(
                "the checkpoint's radii of the rule hyperball are not numbers from "
                f"{LEAST_NORM:g} to {_MOST:g} by the names of matrices: it is damaged, "
                "or not saved by megatron_muon"
            )

    def load(self, saved: Radii | None) -> None:
        """Take the radii of a checkpoint, None where it has none. No communication."""
        self._are_in_use = False
        self.known = saved

    def use(self) -> None:
        """Find the radii that no setting or checkpoint has, and give all to the rules.

        Every rank of the group calls it, before each step; it communicates in the first
        one.

        Raises:
            ValueError: a norm is too small, too large or not finite.
        """
        if self._are_in_use:
            return
        mine = self._found(self.known or {})
        together(lambda: _require_usable(mine), self._group, self._device)
        self.known = {}
        for found in all_gather_json(mine, self._group):
            self.known |= found
        for part in self._parts:
            part.muon.rule.set_radii(self.known)
        self._are_in_use = True

    def require_no_decay(self) -> None:
        """Raise ValueError where a matrix of this rank has a weight decay."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                decays = group["weight_decay"] != 0.0
                if decays and any(map(part.muon.owns, group["params"])):
                    raise ValueError(
                        f"{named('rule')} hyperball keeps the norms of matrices, and a "
                        f"group of them has weight_decay {group['weight_decay']}: give "
                        "--weight-decay 0, or --muon-wd-mult PATTERN=0 with patterns "
                        "of their names"
                    )

    def _found(self, loaded: Radii) -> Radii:
        """The radii of matrices with a slice here. Every rank of a stage calls it."""
        found: Radii = {}
        for part in self._parts:
            given = self._given(part)
            groups = part.optimizer.param_groups
            norms = norms_at_start(part.muon, groups, part.states)
            for name, norm in norms.items():
                before = loaded.get(name, norm)
                radius = given.get(name.partition("[")[0], before)
                # no radius brings back a weight whose square is not finite
                found[name] = radius if math.isfinite(norm) else norm
        return found

    def _given(self, part: Any) -> dict[str, float]:
        """The radii that the settings name, by the name of the parameter."""
        given: dict[str, float] = {}
        for route in part.routes if self._config.radii else ():
            _, radius = last_of(route.weight, self._config.radii, None)
            if radius is not None:
                name = expert_name(route.weight.name, part.ep_rank, part.local_experts)
                given[name] = float(radius)
        return given


def _require_usable(found: Radii) -> None:
    bad = [name for name, radius in found.items() if not _is_usable(radius)]
    if bad:
        raise ValueError(
            f"{first_names(bad, 5)}: the norm is not from {LEAST_NORM:g} to {_MOST:g}, "
            f"and {named('rule')} hyperball would keep it: give {named('radii')}, or "
            f"{named('muon_exclude')} to leave the matrix to AdamW"
        )


def _is_usable(radius: float) -> bool:
    """Whether a weight can have it as a norm."""
    return LEAST_NORM <= radius <= _MOST
