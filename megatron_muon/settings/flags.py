"""Muon's flags on a parsed command line: the value of each, and the ``MuonConfig``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_muon.settings import left
from megatron_muon.settings.config import ROWS, MuonConfig
from megatron_muon.settings.rows import UPSTREAM, Flag, Row
from megatron_muon.settings.rules import MATCHED, row_of
from megatron_muon.settings.run_flags import FLAGS

# of the plugin; the others are names of Megatron's alone
MUONS = ("muon", "dist_muon", "adaptive_muon")
# what is said of the last of them, which has no rule here
ADAPTIVE = (
    "Megatron's adaptive_muon is no rule of megatron_muon: give --optimizer muon with "
    "--muon-rule normuon or namo (MuonConfig(rule='normuon')), which follow the "
    "papers; Megatron's own class (--muon-backend upstream) takes moments and norms of "
    "what a TP rank has of a whole weight, corrects none of them, and by default keeps "
    "one for each element (adamuon)"
)
# how Megatron's own Muon orthogonalizes a matrix that TP cuts
TP_MODES = ("blockwise", "duplicated", "distributed")
# the argument that holds Megatron's own defaults, by dest
KEPT = "megatron_muon_defaults"


def written(args: Namespace, dest: str) -> Any:
    """What argparse has read for a flag; None where it is not on the command line."""
    return getattr(args, dest, None)


def value_of(args: Namespace, row: Row) -> Any:
    """The value that flags give; None where none does.

    Raises:
        ValueError: a flag's value has no meaning, or two flags contradict each other.
    """
    values: dict[str, Any] = {}  # by the flag and its text
    for flag in row.flags:
        text = written(args, flag.dest)
        if text is None:
            continue
        try:
            meaning = flag.kind.read(text)
        except ValueError as error:
            raise ValueError(f"{flag.option}: {error}") from error
        if flag.is_switch:
            text = "(on)" if meaning else "(off)"
        if meaning is not None:
            values[f"{flag.option} {text}"] = meaning
    if not values:
        return None
    value, *others = values.values()
    if any(other != value for other in others):
        raise ValueError(
            f"{' and '.join(values)} contradict each other: they set the same, give one"
        )
    return value


# --- Megatron's own Muon --------------------------------------------------------------


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Megatron's defaults of its own Muon flags, by dest; empty where it has none."""
    return written(args, KEPT) or {}


def upstream_settings(
    defaults: Mapping[str, Any],
) -> Iterator[tuple[str, Flag, Any]]:
    """The settings that Megatron's own Muon has, too: field, its flag, its default.

    ``defaults`` are those of its flags or of OptimizerConfig's fields, by dest. There
    is no setting where this Megatron has no Muon of its own.
    """
    if "muon_scale_mode" not in defaults:
        return
    # core 0.16's has quintic without a flag
    values = {"muon_coefficient_type": "quintic", **defaults}
    for field, row in ROWS.items():
        for flag in row.flags:
            if flag.source == UPSTREAM and flag.dest in values:
                yield field, flag, values[flag.dest]


def flags_of_upstream(defaults: Mapping[str, Any]) -> str:
    """The flags that give Muon here the defaults of Megatron's own; see
    ``upstream_settings``.
    """
    options: list[str] = []
    for field, flag, value in upstream_settings(defaults):
        row = ROWS[field]
        if flag.kind.read(value) != row.default:
            switch = row.flags[0].option  # which turns the default off
            options.append(switch if flag.is_switch else f"{flag.option} {value}")
    return " ".join(options)


def tp_size(args: Any) -> int:
    """The largest number of TP ranks that share a matrix, by arguments or by Megatron's
    config of a model.
    """
    dense = written(args, "tensor_model_parallel_size") or 1
    return max(dense, written(args, "expert_tensor_parallel_size") or dense)


# --- MuonConfig -----------------------------------------------------------------------


def muon_config(args: Namespace) -> MuonConfig:
    """The settings that flags of a parser that ``add_flags`` completed ask for.

    Raises:
        ValueError: a flag has no meaning here; two flags contradict each other; or a
            setting is out of its range.
    """
    _refuse_without_meaning(args)
    settings = {field: value_of(args, row) for field, row in ROWS.items()}
    settings = {field: x for field, x in settings.items() if x is not None}
    # Settings whose default depends on another flag, or that need one.
    settings["qk_clip_alpha"] = qk_clip_alpha(args)
    if "scale_mode" not in row_of(settings.get("rule", "muon")).refuses:
        _set_factor(args, settings)
    # A plan knows --deterministic-mode by this alone; a run finds torch in it, too.
    if "split_matrices" not in settings and written(args, "deterministic_mode"):
        settings["split_matrices"] = "off"
    config = MuonConfig(**settings)
    _refuse_without_setting(args, config)
    return config


def _set_factor(args: Namespace, settings: dict[str, Any]) -> None:
    """Moonlight's factor is for its scale modes only; the others have 1."""
    mode = settings.get("scale_mode", MATCHED[0])
    if mode in MATCHED:
        return
    rms = written(args, "muon_matched_adamw_rms")
    if rms is not None:
        raise ValueError(
            f"--muon-matched-adamw-rms {rms} with --muon-scale-mode {mode}: an update "
            f"has that root mean square with {' and '.join(MATCHED)} only; give "
            "--muon-extra-scale-factor"
        )
    settings.setdefault("matched_adamw_rms", 1.0)


def qk_clip_alpha(args: Namespace) -> float:
    """The queries' share of the clip; a ValueError where it is given without
    ``--muon-qk-clip``.
    """
    alpha: float | None = value_of(args, ROWS["qk_clip_alpha"])
    if alpha is None:
        return MuonConfig.qk_clip_alpha
    if written(args, "muon_qk_clip") is None:
        raise ValueError(
            f"--muon-qk-clip-alpha {alpha} is for --muon-qk-clip THRESHOLD, "
            "which is not given: give it too (Megatron's --qk-clip has "
            "--qk-clip-alpha), or leave this out"
        )
    return alpha


def _refuse_without_setting(args: Namespace, config: MuonConfig) -> None:
    """Refuse flags of Megatron's own Muon that are no setting here, unless they ask for
    what is done here.
    """
    is_bf16 = config.ns_dtype == "bf16" or (
        config.ns_dtype is None and config.preset == "safe"
    )
    done_here = {
        "muon_tp_mode": ("duplicated",) if tp_size(args) > 1 else TP_MODES,
        "muon_fp32_matmul_prec": ("medium",) if is_bf16 else (),
        "muon_scalar_optimizer": ("adam",),
    }
    known = {flag.dest for flag in FLAGS}
    for dest in megatron_defaults(args):
        value = written(args, dest)
        if dest in known or value is None or value in done_here.get(dest, ()):
            continue
        option = f"--{dest.replace('_', '-')}"
        text = option if value is True else f"{option} {value}"
        way_out = left.FLAGS.get(
            option,
            "it is of this Megatron's own Muon; leave it out, or give --muon-backend "
            "upstream",
        )
        raise ValueError(f"{text} has no meaning in megatron_muon: {way_out}")


def _refuse_without_meaning(args: Namespace) -> None:
    if written(args, "adamw_from_muon"):
        raise ValueError(
            "--adamw-from-muon is for --optimizer adam, and this run has --optimizer "
            "muon: leave it out"
        )
    custom = written(args, "muon_coefficient_type") == "custom"
    if custom and written(args, "muon_ns_coefficients") is None:
        raise ValueError(
            "--muon-coefficient-type custom: give the numbers, --muon-ns-coefficients "
            "'a,b,c;...'"
        )


def foreign_flags(args: Namespace, dests: set[str]) -> list[str]:
    """The given options of ``FLAGS`` whose dest is not in ``dests``."""
    return [
        flag.option
        for flag in FLAGS
        if flag.dest not in dests and written(args, flag.dest) is not None
    ]
