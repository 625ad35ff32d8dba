"""The value of each of Muon's flags: the given one, else Megatron's default or the plugin's."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, TypeVar

_T = TypeVar("_T")
KEPT = "megatron_muon_defaults"  # the argument that holds Megatron's own defaults, by dest
# With medium, Emerging-Optimizers' newton_schulz casts matrices to bf16. high is TF32, which is not
# supported here: its restarts are not known.
PRECISIONS = {"medium": "bf16"}


def value_given(args: Namespace, dest: str) -> Any:
    """The value of a flag on the command line; None where it was not given."""
    return getattr(args, dest, None)


def own_defaults(args: Namespace) -> dict[str, Any]:
    """Megatron's defaults of its own Muon flags, by dest; empty where it has none."""
    return getattr(args, KEPT, None) or {}


def upstreams_values(args: Namespace) -> dict[str, Any]:
    """Defaults of Megatron's own Muon by dest, also of settings without a flag.

    Empty where this Megatron has no Muon of its own.
    """
    own = own_defaults(args)
    if "muon_scale_mode" not in own:
        return {}
    # core 0.16's TensorParallelMuon has quintic and Adam, without a flag.
    fixed = {"muon_coefficient_type": "quintic", "muon_scalar_optimizer": "adam"}
    return {**fixed, "muon_use_syrk": False, **own}


def own_nesterov(own: dict[str, Any]) -> bool:
    """Megatron's default for Nesterov, from ``upstreams_values``; its name depends on the core."""
    return bool(own.get("muon_nesterov", own.get("muon_use_nesterov", False)))


def wants_upstreams(args: Namespace) -> bool:
    """Whether ``--muon-defaults upstream`` was given."""
    return bool(value_given(args, "muon_defaults") == "upstream")


def default_value(args: Namespace, dest: str, moonlights: _T) -> _T:
    """``moonlights``, or with ``--muon-defaults upstream`` the default of Megatron's own Muon."""
    upstreams: _T = upstreams_values(args)[dest] if wants_upstreams(args) else moonlights
    return upstreams


def value_chosen(args: Namespace, dest: str, moonlights: _T) -> _T:
    """The given value, or its default."""
    given: _T | None = value_given(args, dest)
    return given if given is not None else default_value(args, dest, moonlights)


def twice(value: _T) -> tuple[_T, _T]:
    """(value, meaning) of a flag whose value is its meaning, for ``one_meaning``."""
    return value, value


def one_meaning(*flags: tuple[str, Any, Any]) -> Any:
    """The meaning that the given ones of several equivalent flags share; None if none is given.

    Args:
        flags: (option, value, meaning); the meaning is None where the flag is not given.

    Raises:
        ValueError: the flags contradict each other.
    """
    given = [flag for flag in flags if flag[2] is not None]
    if len({meaning for _, _, meaning in given}) > 1:
        said = " and ".join(f"{option} {value}" for option, value, _ in given)
        raise ValueError(f"{said} contradict each other: they set the same, give one")
    return given[0][2] if given else None


def refuse_value(
    args: Namespace, dest: str, known: tuple[Any, ...], why: str, way_out: str
) -> None:
    """Raise ValueError unless the value or default of one of Megatron's flags is in ``known``."""
    value = value_chosen(args, dest, known[0])
    if value in known:
        return
    option = f"--{dest.replace('_', '-')}"
    said = option if value is True else f"{option} {value}"
    if value_given(args, dest) is None:
        said += " (Megatron's own default, by --muon-defaults upstream)"
    raise ValueError(f"{said} has no meaning in megatron_muon: {why}; {way_out}")


def tp_size(args: Namespace) -> int:
    """The largest number of TP ranks that share a matrix."""
    dense = value_given(args, "tensor_model_parallel_size") or 1
    return max(dense, value_given(args, "expert_tensor_parallel_size") or dense)
