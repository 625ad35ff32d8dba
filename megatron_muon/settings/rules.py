"""The rules (``--muon-rule``), as far as a run must know one before it imports it, and
those of one's own.

Only a run's own rule is imported. Outside a rule's modules, code asks this table what
differs between rules, and does not compare names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling", "update_norm"]
MATCHED = ("spectral", "update_norm")  # an update has the root mean square that is set


@dataclass(frozen=True, slots=True)
class RuleRow:
    """One rule."""

    says: str  # what it does with a direction, for ``--help``
    # ``module:name`` of the ``runtime.rule.Rule``'s class, or of what makes one
    location: str
    # scale modes that suit it; none: its updates have no scale
    scales: tuple[str, ...] = get_args(ScaleMode)
    adapts: bool = False  # whether its updates are not scale · direction
    shares: bool = True  # whether several homes may share a matrix, as strips
    moments: int = 0  # bytes of second moments of a row or column at its home
    settings: tuple[str, ...] = ()  # fields of MuonConfig that only such rules have
    # fields of MuonConfig that have no meaning with it, each with the reason
    refuses: Mapping[str, str] = field(default_factory=dict)

    def imported(self) -> Any:
        """The rule's class, or what makes a rule from the class's arguments."""
        return _found(self.location)


def _found(location: str) -> Any:
    """What a module has under a name: ``module:name``."""
    module, _, name = location.partition(":")
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
        moments=4,
        scales=get_args(ScaleMode)[:3],  # it normalizes its directions itself
        settings=_MOMENTS,
        refuses={"full_period": "whose second moments are of whole matrices"},
    ),
    "namo": RuleRow(
        "muon's step and decay, times the norm of the momentum over the root of a "
        "second moment of the gradient's norm (NAMO, arXiv 2602.17080)",
        "megatron_muon.rules.namo:Namo",
        adapts=True,
        settings=_MOMENTS,
        refuses={
            "full_period": "whose norms are of whole matrices",
            "cautious_decay": "whose decay has the factor of its step",
            "independent_decay": "whose decay has the factor of its step",
            "momentum_warmup": "whose correction has one momentum",
        },
    ),
}


def help_text() -> str:
    """What the rules do, for ``--help``."""
    return ". ".join(f"{name}: {rule.says}" for name, rule in RULES.items())


# --- rules of one's own ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnRule:
    """A function of whole matrices in place of Newton-Schulz, with what it declares.

    At its home a matrix is whole, whatever the sizes of TP, DP and EP. Momentum, decay
    and update are Muon's. So are the units: heads, experts and parts of fused weights
    come one by one, as Muon orthogonalizes them.

    Attributes:
        direction: takes matrices of one shape, ``(b, rows, cols)`` fp32, and returns
            their directions, of the same shape and dtype, each a function of its matrix
            alone. It may overwrite what it takes. How many matrices come together
            depends on the layout. Or it is a class, a ``runtime.rule.Rule`` with the
            arguments of ``rules.muon.Muon``.
        takes: ``matrix``: ``direction`` takes and returns one ``(rows, cols)``, and is
            called for each, as most functions of Emerging-Optimizers are.
        reads_host: whether it has the host read from the device, as ``item()`` and
            ``torch.linalg.svd`` do. The host then waits for the device in each call. On
            a GPU an undeclared read is an error at start.
        scale: the factor on a direction, per unit of the learning rate, from a whole
            matrix's rows and columns. None: Muon's, by ``matched_adamw_rms`` and
            ``scale_mode``.
    """

    direction: Callable[[Any], Any] | type[Any]
    takes: Literal["batch", "matrix"] = "batch"
    reads_host: bool = False
    scale: Callable[[int, int], float] | None = None

    def __post_init__(self) -> None:
        if not callable(self.direction):
            raise TypeError(f"OwnRule takes a function or class, got {self.direction}")
        if self.takes not in ("batch", "matrix"):
            raise ValueError(f"takes must be batch or matrix, got {self.takes!r}")


# of every rule of one's own, before it is imported
OWN = RuleRow("", "megatron_muon.rules.own:make", scales=(), shares=False)
_registered: dict[str, OwnRule] = {}


def register_rule(name: str, rule: OwnRule | Callable[[Any], Any] | type[Any]) -> None:
    """Give a rule of one's own a name for ``--muon-rule`` and ``MuonConfig(rule=…)``.

    Every rank registers it, before its settings are made. A rule that is at the top of
    a module needs no registration: its name is ``module:name``.

    Args:
        name: letters, digits and underscores; that of no other rule.
        rule: a function or class stands for an ``OwnRule`` of it.

    Raises:
        TypeError: ``rule`` is no function, class or ``OwnRule``.
        ValueError: ``name`` is not such a name, or that of another rule.
    """
    if not name.isidentifier():
        raise ValueError(f"a rule's name has letters, digits and _, got {name!r}")
    if name in RULES or name in _registered:
        raise ValueError(f"there is a rule {name!r} already: choose another name")
    _registered[name] = _as_own(rule)


def _as_own(rule: Any) -> OwnRule:
    return rule if isinstance(rule, OwnRule) else OwnRule(rule)


def row_of(name: str) -> RuleRow:
    """What is known of a rule without importing it."""
    return RULES.get(name, OWN)


def own_rule(name: str) -> OwnRule | None:
    """The rule of one's own that has a name; its module is imported. None for a rule of
    this package.

    Raises:
        ValueError: there is none, or its module does not import.
    """
    if name in RULES:
        return None
    if name in _registered:
        return _registered[name]
    try:
        return _as_own(_found(name))
    # of any type: the module's code runs, and may end the process without a word
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"--muon-rule {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def is_name(name: str) -> bool:
    """Whether a rule has this name, or ``module:name`` would be imported by it."""
    parts = name.replace(":", ".", 1).split(".")
    is_import = ":" in name and all(map(str.isidentifier, parts))
    return is_import or name in RULES or name in _registered


def require_name(setting: str, name: object) -> None:
    """Raise TypeError or ValueError where a setting is no rule's name.

    No module is imported: the name may come from a checkpoint.
    """
    if not isinstance(name, str):
        raise TypeError(f"{setting} must be a text, got {name!r}")
    if not is_name(name):
        names = ", ".join((*RULES, *_registered))
        raise ValueError(
            f"{setting} must be one of {names}, or MODULE:NAME, got {name!r}"
        )
