"""The ``MuonConfig`` that Megatron-LM's parsed flags ask for."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from megatron_muon.settings.coefficients import default_steps, require_whole
from megatron_muon.settings.config import ROWS, MuonConfig
from megatron_muon.settings.flag_values import (
    own_defaults,
    setting_given,
    setting_of,
    tp_size,
    upstreams_values,
    value_given,
    wants_upstreams,
)
from megatron_muon.settings.run_flags import FLAGS, RUN_ROWS


def muon_config(args: Namespace) -> MuonConfig:
    """The settings that flags of a parser that ``add_flags`` completed ask for.

    Raises:
        ValueError: a flag, or a default of ``--muon-defaults upstream``, has no meaning
            here; two flags contradict each other; or a setting is out of its range.
    """
    if wants_upstreams(args) and not upstreams_values(args):
        raise ValueError(
            "--muon-defaults upstream: this Megatron has no Muon of its own (core 0.16 "
            "and later have); give --muon-defaults moonlight or nothing"
        )
    _refuse_unknown(args)
    _refuse_without_meaning(args)
    settings = {field: setting_of(args, row) for field, row in ROWS.items()}
    # Settings whose default depends on another flag, or that need one.
    settings["matched_adamw_rms"] = _factor(args, settings)
    settings["ns_steps"] = _steps(args, settings)
    settings["ns_dtype"] = _dtype(args, settings)
    settings["qk_clip_alpha"] = qk_clip_alpha(args)
    settings["log_file"] = _log_file(args, settings)
    # A plan knows --deterministic-mode by this alone; a run finds torch in it, too.
    if settings["split_matrices"] is None and getattr(
        args, "deterministic_mode", False
    ):
        settings["split_matrices"] = "off"
    return MuonConfig(**settings)


def _factor(args: Namespace, settings: dict[str, Any]) -> float:
    """Moonlight's factor is for its scale mode only; the others have 1."""
    mode, rms = settings["scale_mode"], value_given(args, "muon_matched_adamw_rms")
    if mode == "spectral":
        return float(settings["matched_adamw_rms"])
    if rms is not None:
        raise ValueError(
            f"--muon-matched-adamw-rms {rms} with --muon-scale-mode {mode}: an update "
            "has that root mean square with spectral only; give "
            "--muon-extra-scale-factor"
        )
    given = setting_given(args, ROWS["matched_adamw_rms"])
    return (
        1.0
        if given is None and not wants_upstreams(args)
        else settings["matched_adamw_rms"]
    )


def _steps(args: Namespace, settings: dict[str, Any]) -> int:
    """The number that is given, or is upstream's default, must be one that the set can
    have.
    """
    coefficients, steps = settings["ns_coefficients"], int(settings["ns_steps"])
    if setting_given(args, ROWS["ns_steps"]) is None and not wants_upstreams(args):
        return default_steps(coefficients)
    require_whole(coefficients, steps)
    return steps


def _dtype(args: Namespace, settings: dict[str, Any]) -> Any:
    """``--muon-fp32-matmul-prec medium``, also by upstream's default, is bf16."""
    precision, dtype = value_given(args, "muon_fp32_matmul_prec"), settings["ns_dtype"]
    if value_given(args, "muon_ns_dtype") == "auto":
        return None
    if precision == "medium" and dtype not in (None, "bf16"):
        raise ValueError(
            f"--muon-ns-dtype {dtype} and --muon-fp32-matmul-prec medium contradict "
            "each other: they set the same, give one"
        )
    return "bf16" if dtype is None and (precision or wants_upstreams(args)) else dtype


def qk_clip_alpha(args: Namespace) -> float:
    """The queries' share of the clip; a ValueError where it is given without
    ``--muon-qk-clip``.
    """
    given = value_given(args, "muon_qk_clip_alpha")
    if given is not None and value_given(args, "muon_qk_clip") is None:
        raise ValueError(
            f"--muon-qk-clip-alpha {given} is for --muon-qk-clip THRESHOLD, which is "
            "not given: give it too (Megatron's --qk-clip has --qk-clip-alpha), or "
            "leave this out"
        )
    return float(setting_of(args, ROWS["qk_clip_alpha"]))


def _log_file(args: Namespace, settings: dict[str, Any]) -> Any:
    interval, file = settings["log_interval"], settings["log_file"]
    if file is not None or interval is None:
        return file
    folder = value_given(args, "tensorboard_dir") or value_given(args, "save")
    if not folder:
        raise ValueError(
            f"--muon-log-interval {interval} needs a place for its lines: give "
            "--muon-log-file, --tensorboard-dir or --save"
        )
    return os.path.join(folder, "muon_watch.jsonl")


# --- refusals -------------------------------------------------------------------------


def _refuse_unknown(args: Namespace) -> None:
    known = {flag.dest for flag in FLAGS}
    for dest in own_defaults(args):
        if dest not in known and value_given(args, dest) is not None:
            raise ValueError(
                f"--{dest.replace('_', '-')} {value_given(args, dest)} is a flag of "
                "this Megatron's own Muon that megatron_muon does not know: leave it "
                "out, or give --muon-backend upstream"
            )


def _refuse_without_meaning(args: Namespace) -> None:
    if value_given(args, "adamw_from_muon"):
        raise ValueError(
            "--adamw-from-muon is for --optimizer adam, and this run has --optimizer "
            "muon: leave it out"
        )
    custom = value_given(args, "muon_coefficient_type") == "custom"
    if custom and value_given(args, "muon_ns_coefficients") is None:
        raise ValueError(
            "--muon-coefficient-type custom: give the numbers, --muon-ns-coefficients "
            "'a,b,c;...'"
        )
    for row in RUN_ROWS:
        value, flag, only = setting_of(args, row), row.flags[0], row.only
        applies = tp_size(args) > 1 or flag.dest != "muon_tp_mode"
        if only and applies and value != only.value:
            said = flag.option if flag.is_switch else f"{flag.option} {value}"
            if value_given(args, flag.dest) is None:
                said += " (Megatron's own default, by --muon-defaults upstream)"
            raise ValueError(
                f"{said} has no meaning in megatron_muon: {only.why}; {only.way_out}"
            )
