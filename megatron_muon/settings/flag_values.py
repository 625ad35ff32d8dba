"""The value of each of Muon's flags: the given one, else Megatron's default or the
plugin's.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_muon.settings.rows import UPSTREAM, Row
from megatron_muon.settings.run_flags import FLAGS

MUONS = ("muon", "dist_muon")  # of the plugin; the second is Megatron's, layer by layer
KEPT = (
    "megatron_muon_defaults"  # the argument that holds Megatron's own defaults, by dest
)


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


def wants_upstreams(args: Namespace) -> bool:
    """Whether ``--muon-defaults upstream`` was given."""
    return bool(value_given(args, "muon_defaults") == "upstream")


def upstreams_setting(args: Namespace, row: Row) -> Any:
    """The setting that Megatron's own Muon has by default; None where it has no such
    setting.
    """
    own = upstreams_values(args)
    for flag in row.flags:
        if flag.source == UPSTREAM and flag.dest in own:
            return flag.kind.read(own[flag.dest])
    return None


def setting_given(args: Namespace, row: Row) -> Any:
    """The setting that a row's given flags mean, if any; a ValueError where they
    contradict.
    """
    told, meanings = [], []
    for flag in row.flags:
        value = value_given(args, flag.dest)
        if value is None:
            continue
        try:
            meaning = flag.kind.read(value)
        except ValueError as error:
            raise ValueError(f"{flag.option}: {error}") from error
        if meaning is not None:
            meanings.append(meaning)
            shown = value
            if flag.is_switch:
                shown = "(on)" if meaning else "(off)"
            told.append(f"{flag.option} {shown}")
    if any(meaning != meanings[0] for meaning in meanings[1:]):
        raise ValueError(
            f"{' and '.join(told)} contradict each other: they set the same, give one"
        )
    return meanings[0] if meanings else None


def setting_of(args: Namespace, row: Row) -> Any:
    """The setting that flags give; else its default, as ``--muon-defaults`` says."""
    given = setting_given(args, row)
    if given is None and wants_upstreams(args):
        given = upstreams_setting(args, row)
    return row.default if given is None else given


def tp_size(args: Namespace) -> int:
    """The largest number of TP ranks that share a matrix."""
    dense = value_given(args, "tensor_model_parallel_size") or 1
    return max(dense, value_given(args, "expert_tensor_parallel_size") or dense)


def foreign_flags(args: Namespace, dests: set[str]) -> list[str]:
    """The given options of ``FLAGS`` whose dest is not in ``dests``."""
    return [
        flag.option
        for flag in FLAGS
        if flag.dest not in dests and value_given(args, flag.dest) is not None
    ]
