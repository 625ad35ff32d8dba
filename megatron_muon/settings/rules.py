"""The rules (``--muon-rule``), as far as a run must know one before it imports it.

Only a run's own rule is imported. Outside a rule's modules, code asks this table what
differs between rules, and does not compare names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule."""

    says: str  # what it does with a direction, for ``--help``
    location: str  # ``module:class`` of the ``runtime.rule.Rule``
    # scale modes that suit it; none: its updates have no scale
    scales: tuple[str, ...] = get_args(ScaleMode)
    sums: bool = False  # whether it asks for sums over whole matrices
    settings: tuple[str, ...] = ()  # fields of MuonConfig that only such rules have
    # fields of MuonConfig that have no meaning with it, each with the reason
    refuses: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_moments(self) -> bool:
        """Whether it keeps second moments."""
        return "moment2_beta2" in self.settings

    def imported(self) -> Any:
        """The rule's class."""
        module, _, name = self.location.partition(":")
        return getattr(importlib.import_module(module), name)


# of second moments
_MOMENTS = ("moment2_beta2", "moment2_eps")
RULES = {
    "muon": RuleRow("a decayed step", "megatron_muon.rules.muon:Muon"),
    "hyperball": RuleRow(
        "a step on the sphere of the matrix's own norm, lr being its length in radii, "
        "without weight decay and without a scale (MuonH, arXiv 2606.16899)",
        "megatron_muon.rules.hyperball:Hyperball",
        scales=(),
        sums=True,
        settings=("radii",),
        refuses={
            **dict.fromkeys(
                ("matched_adamw_rms", "scale_mode", "full_period"),
                "whose lr is the length of a step in radii",
            ),
            **dict.fromkeys(
                ("cautious_decay", "independent_decay"), "which has no weight decay"
            ),
        },
    ),
    "normuon": RuleRow(
        "muon's step of a direction whose rows, or columns where it is wide, are each "
        "divided by the root of a second moment (NorMuon, arXiv 2510.05491)",
        "megatron_muon.rules.normuon:NorMuon",
        settings=_MOMENTS,
        refuses={"full_period": "whose second moments are of whole matrices"},
    ),
}


def help_text() -> str:
    """What the rules do, for ``--help``."""
    return ". ".join(f"{name}: {rule.says}" for name, rule in RULES.items())
