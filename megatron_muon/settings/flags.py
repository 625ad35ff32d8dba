"""Muon's flags on a parsed command line: the value of each, and the ``MuonConfig``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_muon.settings.config import ROWS, MuonConfig
from megatron_muon.settings.rows import OURS, UPSTREAM, Dialect, Flag, Row
from megatron_muon.settings.rules import MATCHED, row_of
from megatron_muon.settings.run_flags import FLAGS, RUN_ROWS

# of the plugin; the others are names of Megatron's alone, with all of its defaults
MUONS = ("muon", "dist_muon", "adaptive_muon")
# what is said of the last of them, which has no rule here
ADAPTIVE = (
    "Megatron's adaptive_muon is no rule of megatron_muon: give --optimizer muon with "
    "--muon-rule normuon or namo (MuonConfig(rule='normuon')), which follow the "
    "papers; Megatron's own class (--muon-backend upstream) takes moments and norms of "
    "what a TP rank has of a whole weight, corrects none of them, and by default keeps "
    "one for each element (adamuon)"
)
# the argument that holds Megatron's own defaults, by dest
KEPT = "megatron_muon_defaults"


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a setting, and where it comes from."""

    value: Any
    dialect: Dialect  # whose flag it is, or whose default
    is_given: bool  # whether its flag is on the command line
    flag: Flag

    @property
    def is_default(self) -> bool:
        """Whether neither a flag nor ``--muon-defaults upstream`` set it."""
        return self.dialect == OURS and not self.is_given


def written(args: Namespace, dest: str) -> Any:
    """What argparse has read for a flag; None where it is not on the command line."""
    return getattr(args, dest, None)


def value_of(args: Namespace, row: Row) -> Value:
    """The value that flags give; else the default, as ``--muon-defaults`` says.

    Raises:
        ValueError: a flag's value has no meaning, or two flags contradict each other.
    """
    value = _written_value(args, row)
    if value is None and wants_upstream(args):
        value = upstream_value(args, row)
    return value or Value(row.default, OURS, False, row.flags[0])


def _written_value(args: Namespace, row: Row) -> Value | None:
    values: list[Value] = []
    texts: list[str] = []
    for flag in row.flags:
        text = written(args, flag.dest)
        if text is None:
            continue
        try:
            meaning = flag.kind.read(text)
        except ValueError as error:
            raise ValueError(f"{flag.option}: {error}") from error
        if meaning is None:
            continue
        if flag.is_switch:
            text = "(on)" if meaning else "(off)"
        texts.append(f"{flag.option} {text}")
        values.append(Value(meaning, flag.source, True, flag))
    if any(other.value != values[0].value for other in values[1:]):
        raise ValueError(
            f"{' and '.join(texts)} contradict each other: they set the same, give one"
        )
    return values[0] if values else None


# --- Megatron's own Muon --------------------------------------------------------------


def megatron_defaults(args: Namespace) -> dict[str, Any]:
    """Megatron's defaults of its own Muon flags, by dest; empty where it has none."""
    return written(args, KEPT) or {}


def upstream_defaults(args: Namespace) -> dict[str, Any]:
    """Defaults of Megatron's own Muon by dest, also of settings without a flag.

    Empty where this Megatron has no Muon of its own.
    """
    defaults = megatron_defaults(args)
    if "muon_scale_mode" not in defaults:
        return {}
    # core 0.16's TensorParallelMuon has quintic and Adam, without a flag.
    fixed = {"muon_coefficient_type": "quintic", "muon_scalar_optimizer": "adam"}
    return {**fixed, "muon_use_syrk": False, **defaults}


def wants_upstream(args: Namespace) -> bool:
    """Whether ``--muon-defaults upstream`` was given."""
    return bool(written(args, "muon_defaults") == "upstream")


def upstream_value(args: Namespace, row: Row) -> Value | None:
    """The default of Megatron's own Muon; None where it has no such setting."""
    defaults = upstream_defaults(args)
    for flag in row.flags:
        if flag.source == UPSTREAM and flag.dest in defaults:
            return Value(flag.kind.read(defaults[flag.dest]), UPSTREAM, False, flag)
    return None


def tp_size(args: Namespace) -> int:
    """The largest number of TP ranks that share a matrix."""
    dense = written(args, "tensor_model_parallel_size") or 1
    return max(dense, written(args, "expert_tensor_parallel_size") or dense)


def blockwise_lines(args: Namespace, option: str, mode: str | None) -> list[str]:
    """A warning where Megatron's own Muon would orthogonalize slices of matrices."""
    size = tp_size(args)
    if mode != "blockwise" or size == 1:
        return []
    return [
        f"warning: {option}, in Megatron's own Muon, is other mathematics with TP "
        f"{size}: each rank's slice by itself; here every matrix is orthogonalized "
        "whole, as by duplicated"
    ]


# --- MuonConfig -----------------------------------------------------------------------


def muon_config(args: Namespace) -> MuonConfig:
    """The settings that flags of a parser that ``add_flags`` completed ask for.

    Raises:
        ValueError: a flag, or a default of ``--muon-defaults upstream``, has no meaning
            here; two flags contradict each other; or a setting is out of its range.
    """
    if wants_upstream(args) and not upstream_defaults(args):
        raise ValueError(
            "--muon-defaults upstream: this Megatron has no Muon of its own (core 0.16 "
            "and later have); give --muon-defaults moonlight or nothing"
        )
    _refuse_unknown(args)
    _refuse_without_meaning(args)
    values = {field: value_of(args, row) for field, row in ROWS.items()}
    settings = {
        field: value.value for field, value in values.items() if not value.is_default
    }
    # Settings whose default depends on another flag, or that need one.
    settings["matched_adamw_rms"] = _factor(args, values)
    settings["ns_dtype"] = _dtype(args, values["ns_dtype"].value)
    settings["qk_clip_alpha"] = qk_clip_alpha(args)
    for field in row_of(values["rule"].value).unscaled:
        if values[field].is_given and values[field].value != ROWS[field].default:
            raise ValueError(
                f"{values[field].flag.option} has no meaning with --muon-rule "
                f"{values['rule'].value}, whose updates have no scale: leave it out"
            )
        settings.pop(field, None)  # Megatron's default
    # A plan knows --deterministic-mode by this alone; a run finds torch in it, too.
    if "split_matrices" not in settings and written(args, "deterministic_mode"):
        settings["split_matrices"] = "off"
    return MuonConfig(**settings)


def _factor(args: Namespace, values: dict[str, Value]) -> float:
    """Moonlight's factor is for its scale modes only; the others have 1."""
    factor, mode = values["matched_adamw_rms"], values["scale_mode"].value
    rms = written(args, "muon_matched_adamw_rms")
    if mode not in MATCHED and rms is not None:
        raise ValueError(
            f"--muon-matched-adamw-rms {rms} with --muon-scale-mode {mode}: an update "
            f"has that root mean square with {' and '.join(MATCHED)} only; give "
            "--muon-extra-scale-factor"
        )
    if mode not in MATCHED and factor.is_default:
        return 1.0
    return float(factor.value)


def _dtype(args: Namespace, dtype: Any) -> Any:
    """``--muon-fp32-matmul-prec medium``, also by upstream's default, is bf16."""
    precision = written(args, "muon_fp32_matmul_prec")
    if written(args, "muon_ns_dtype") == "auto":
        return None
    if precision == "medium" and dtype not in (None, "bf16"):
        raise ValueError(
            f"--muon-ns-dtype {dtype} and --muon-fp32-matmul-prec medium contradict "
            "each other: they set the same, give one"
        )
    return "bf16" if dtype is None and (precision or wants_upstream(args)) else dtype


def qk_clip_alpha(args: Namespace) -> float:
    """The queries' share of the clip; a ValueError where it is given without
    ``--muon-qk-clip``.
    """
    alpha = value_of(args, ROWS["qk_clip_alpha"])
    if alpha.is_given and written(args, "muon_qk_clip") is None:
        raise ValueError(
            f"--muon-qk-clip-alpha {alpha.value} is for --muon-qk-clip THRESHOLD, "
            "which is not given: give it too (Megatron's --qk-clip has "
            "--qk-clip-alpha), or leave this out"
        )
    return float(alpha.value)


def _refuse_unknown(args: Namespace) -> None:
    known = {flag.dest for flag in FLAGS}
    for dest in megatron_defaults(args):
        if dest not in known and written(args, dest) is not None:
            raise ValueError(
                f"--{dest.replace('_', '-')} {written(args, dest)} is a flag of this "
                "Megatron's own Muon that megatron_muon does not know: leave it out, "
                "or give --muon-backend upstream"
            )


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
    for row in RUN_ROWS:
        asked = value_of(args, row)
        option = asked.flag.option
        is_free = option == "--muon-tp-mode" and tp_size(args) == 1
        if row.only is None or asked.value == row.default or is_free:
            continue
        text = option if asked.flag.is_switch else f"{option} {asked.value}"
        if not asked.is_given:
            text += " (Megatron's own default, by --muon-defaults upstream)"
        raise ValueError(
            f"{text} has no meaning in megatron_muon: {row.only.why}; "
            f"{row.only.way_out}"
        )


def foreign_flags(args: Namespace, dests: set[str]) -> list[str]:
    """The given options of ``FLAGS`` whose dest is not in ``dests``."""
    return [
        flag.option
        for flag in FLAGS
        if flag.dest not in dests and written(args, flag.dest) is not None
    ]
