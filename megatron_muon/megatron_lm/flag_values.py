"""The value of each of Muon's flags: the given one, else Megatron's default or ours."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, TypeVar

_T = TypeVar("_T")
KEPT = "megatron_muon_defaults"  # where the arguments hold Megatron's own defaults, by dest


def value_given(args: Namespace, dest: str) -> Any:
    """None where it was not."""
    return getattr(args, dest, None)


def own_defaults(args: Namespace) -> dict[str, Any]:
    """Megatron's own, by dest, of the flags of Muon's that it has itself."""
    return getattr(args, KEPT, None) or {}


def upstreams_values(args: Namespace) -> dict[str, Any]:
    """Defaults of Megatron's own Muon by dest, also those that it has no flag for; else empty."""
    own = own_defaults(args)
    if "muon_scale_mode" not in own:
        return {}
    # core 0.16's TensorParallelMuon has quintic and Adam, without a flag.
    fixed = {"muon_coefficient_type": "quintic", "muon_scalar_optimizer": "adam"}
    return {**fixed, "muon_use_syrk": False, **own}


def own_nesterov(own: dict[str, Any]) -> bool:
    """The name among ``upstreams_values``: core 0.16 and 0.17 have another one for it."""
    return bool(own.get("muon_nesterov", own.get("muon_use_nesterov", False)))


def wants_upstreams(args: Namespace) -> bool:
    """``--muon-defaults upstream`` was given."""
    return bool(value_given(args, "muon_defaults") == "upstream")


def default_value(args: Namespace, dest: str, moonlights: _T) -> _T:
    """Megatron's own Muon's by ``--muon-defaults upstream``, else ``moonlights``."""
    upstreams: _T = upstreams_values(args)[dest] if wants_upstreams(args) else moonlights
    return upstreams


def value_chosen(args: Namespace, dest: str, moonlights: _T) -> _T:
    """The given value, or its default."""
    given: _T | None = value_given(args, dest)
    return given if given is not None else default_value(args, dest, moonlights)


def twice(value: _T) -> tuple[_T, _T]:
    """A flag whose value is its meaning, for ``one_meaning``."""
    return value, value


def one_meaning(*flags: tuple[str, Any, Any]) -> Any:
    """The one meaning of flags that mean the same: (option, value, meaning or None).

    Raises:
        ValueError: they contradict each other.
    """
    given = [flag for flag in flags if flag[2] is not None]
    if len({meaning for _, _, meaning in given}) > 1:
        said = " and ".join(f"{option} {value}" for option, value, _ in given)
        raise ValueError(f"{said} contradict each other: they set the same, give one")
    return given[0][2] if given else None


def refuse_value(
    args: Namespace, dest: str, known: tuple[Any, ...], why: str, way_out: str
) -> None:
    """Raise ValueError unless the value of a flag of Megatron's, or its default, is known."""
    value = value_chosen(args, dest, known[0])
    if value in known:
        return
    option = f"--{dest.replace('_', '-')}"
    said = option if value is True else f"{option} {value}"
    if value_given(args, dest) is None:
        said += " (Megatron's own default, by --muon-defaults upstream)"
    raise ValueError(f"{said} has no meaning in megatron_muon: {why}; {way_out}")
