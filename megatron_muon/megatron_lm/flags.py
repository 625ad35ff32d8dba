"""Muon's flags on Megatron-LM's command line, and the ``MuonConfig`` that they ask for.

Flags have three sources: the proof of concept of this work, Megatron-LM's own Muon (core 0.16 and
later; ``megatron/training/arguments.py``) and this plugin. All are accepted with every Megatron
version. A flag keeps the meaning that it has at its source, or is an error; none is ignored.

Every default is None, which shows the flags that were given. Megatron's own defaults are kept in
``args.megatron_muon_defaults``, by dest.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_muon.coefficients import Coefficients, canonical, parse, spelled
from megatron_muon.config import MuonConfig, SplitKind, SplitMatrices
from megatron_muon.megatron_lm.flag_table import AUTO_NS_DTYPE, FLAGS, OF_ANY
from megatron_muon.megatron_lm.flag_values import (
    KEPT,
    default_value,
    one_meaning,
    own_defaults,
    own_nesterov,
    refuse_value,
    twice,
    upstreams_values,
    value_chosen,
    value_given,
    wants_upstreams,
)

_MOONLIGHT = MuonConfig()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``muon`` to the choices of ``--optimizer``, and every flag of Muon's.

    Args:
        parser: a parser with all of Megatron's arguments. Flags that it already has keep their
            action and type.
    """
    actions = parser._option_string_actions
    optimizer = actions.get("--optimizer")
    if optimizer is not None and optimizer.choices and "muon" not in optimizer.choices:
        optimizer.choices = [*optimizer.choices, "muon"]
    known = {flag.option for flag in FLAGS}
    own = {
        action.dest: action.default
        for option, action in actions.items()
        if option.startswith("--muon-") or option in known
    }
    group = parser.add_argument_group("distributed muon")
    for flag in FLAGS:
        if flag.option in actions:
            actions[flag.option].help = flag.help
        else:
            group.add_argument(flag.option, default=None, help=flag.help, **flag.keywords)
    parser.set_defaults(**dict.fromkeys(own), **{KEPT: own})


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of help texts that argparse cannot print, so that ``--help`` works.

    Megatron-LM has such texts from 0.18 on; its own ``--help`` ends in a ValueError.
    """
    formatter = parser._get_formatter()
    for action in parser._actions:
        if not action.help:
            continue
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")


def muon_backend(args: Namespace) -> str:
    """The implementation of ``--optimizer muon``: ``plugin``, or ``upstream`` (Megatron's own).

    Raises:
        ValueError: upstream is asked for, and this Megatron has no Muon of its own, or lacks
            another flag that is given.
    """
    if value_given(args, "muon_backend") != "upstream":
        return "plugin"
    if not hasattr(args, KEPT):
        return "upstream"  # ``leave_to_megatron`` has already handled these arguments
    if not upstreams_values(args):
        raise ValueError(
            "--muon-backend upstream: this Megatron has no Muon of its own (core 0.16 and later "
            "have); leave it out"
        )
    foreign = foreign_flags(args, {*own_defaults(args), "muon_backend", *OF_ANY})
    if foreign:
        raise ValueError(
            f"--muon-backend upstream leaves everything to Megatron's own Muon, which has no "
            f"{', '.join(foreign)} in this version: leave out one or the other"
        )
    return "upstream"


def foreign_flags(args: Namespace, dests: set[str]) -> list[str]:
    """The given options of ``FLAGS`` whose dest is not in ``dests``."""
    return [
        flag.option
        for flag in FLAGS
        if flag.dest not in dests and value_given(args, flag.dest) is not None
    ]


def restore_defaults(args: Namespace) -> None:
    """Set Megatron's own default again for every flag that was not given.

    Call it after ``muon_config`` and ``differences``, which must know the flags that were given.
    """
    for dest, default in own_defaults(args).items():
        if value_given(args, dest) is None:
            setattr(args, dest, default)


def muon_config(args: Namespace) -> MuonConfig:
    """The settings that parsed flags ask for.

    Args:
        args: result of a parser that ``add_flags`` completed; ``tensor_model_parallel_size`` and
            ``expert_tensor_parallel_size`` are read, too.

    Raises:
        ValueError: a flag, or a default of ``--muon-defaults upstream``, has no meaning here; two
            flags contradict each other; or a setting is out of its range.
    """
    _require_upstreams_defaults(args)
    _refuse_unknown(args)
    _refuse_what_has_no_meaning(args)
    scale_mode = value_chosen(args, "muon_scale_mode", _MOONLIGHT.scale_mode)
    return MuonConfig(
        matched_adamw_rms=_factor(args, scale_mode),
        scale_mode=scale_mode,
        momentum=value_chosen(args, "muon_momentum", _MOONLIGHT.momentum),
        nesterov=_nesterov(args),
        ns_steps=_ns_steps(args),
        ns_coefficients=_ns_coefficients(args),
        ns_iteration=value_given(args, "muon_ns_iteration"),
        ns_dtype=_ns_dtype(args),
        ns_batch=_ns_batch(args),
        elementwise=value_given(args, "muon_elementwise") or _MOONLIGHT.elementwise,
        clip_scope=value_given(args, "muon_clip_scope") or _MOONLIGHT.clip_scope,
        weight_decay_all_params=bool(value_given(args, "weight_decay_all_params")),
        split_qkv=value_chosen(args, "muon_split_qkv", _MOONLIGHT.split_qkv),
        splits=_splits(args),
        lr_mults=_multipliers(args, "muon_lr_mult"),
        wd_mults=_multipliers(args, "muon_wd_mult"),
        qk_clip=value_given(args, "muon_qk_clip"),
        qk_clip_alpha=qk_clip_alpha(args),
        muon_include=tuple(value_given(args, "muon_include") or ()),
        muon_exclude=tuple(value_given(args, "muon_exclude") or ()),
        homes=value_given(args, "muon_homes") or _MOONLIGHT.homes,
        split_matrices=_split_matrices(args),
        rank_tflops=_number(args, "rank_tflops"),
        link_gbytes=_number(args, "link_gbytes"),
        round_bytes=_round_bytes(args),
        checkpoint_digest=not value_given(args, "no_muon_checkpoint_digest"),
        log_interval=value_given(args, "muon_log_interval"),
        log_file=_log_file(args),
    )


def _splits(args: Namespace) -> tuple[tuple[str, SplitKind], ...]:
    return tuple(_pairs(args, "muon_split", "KIND"))


def _multipliers(args: Namespace, name: str) -> tuple[tuple[str, float], ...]:
    pairs = []
    for pattern, text in _pairs(args, name, "FACTOR"):
        try:
            pairs.append((pattern, float(text)))
        except ValueError as error:
            raise ValueError(
                f"{_flag_of(name)} {pattern}={text}: {text!r} is not a number"
            ) from error
    return tuple(pairs)


def _pairs(args: Namespace, name: str, second: str) -> Iterator[tuple[str, Any]]:
    for text in value_given(args, name) or ():
        pattern, equals, value = text.rpartition("=")
        if not (pattern and equals):
            raise ValueError(f"{_flag_of(name)} must be PATTERN={second}, got {text!r}")
        yield pattern, value


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _log_file(args: Namespace) -> str | None:
    given: str | None = value_given(args, "muon_log_file")
    interval = value_given(args, "muon_log_interval")
    if given is not None or interval is None:
        return given
    folder = value_given(args, "tensorboard_dir") or value_given(args, "save")
    if not folder:
        raise ValueError(
            f"--muon-log-interval {interval} needs a place for its lines: give --muon-log-file, "
            "--tensorboard-dir or --save"
        )
    return os.path.join(folder, "muon_watch.jsonl")


def qk_clip_alpha(args: Namespace) -> float:
    """The queries' share of the clip of ``--muon-qk-clip``.

    Raises:
        ValueError: it is given without that flag, and would be ignored.
    """
    given = value_given(args, "muon_qk_clip_alpha")
    if given is not None and value_given(args, "muon_qk_clip") is None:
        raise ValueError(
            f"--muon-qk-clip-alpha {given} is for --muon-qk-clip THRESHOLD, which is not given: "
            "give it too (Megatron's --qk-clip has --qk-clip-alpha), or leave this out"
        )
    return _MOONLIGHT.qk_clip_alpha if given is None else float(given)


def _number(args: Namespace, name: str) -> float:
    given = value_given(args, f"muon_{name}")
    return float(getattr(_MOONLIGHT, name) if given is None else given)


def _split_matrices(args: Namespace) -> SplitMatrices | None:
    asked: SplitMatrices | None = value_given(args, "muon_split_matrices")
    # A plan knows --deterministic-mode by this alone; a run finds torch in it, too.
    return "off" if asked is None and getattr(args, "deterministic_mode", False) else asked


def _ns_batch(args: Namespace) -> int | None:
    count = value_given(args, "muon_ns_batch")
    if count is not None and count < 0:
        raise ValueError(f"--muon-ns-batch must be auto or a number from 1, got {count}")
    return count or None


def _round_bytes(args: Namespace) -> int | None:
    mib = value_given(args, "muon_round_mib")
    if mib is not None and mib < 0:
        raise ValueError(f"--muon-round-mib must be at least 1, or 0 for the default, got {mib}")
    return int(mib) << 20 if mib else None


def differences(args: Namespace) -> list[str]:
    """A line for every setting that differs from the default of this Megatron's own Muon.

    There is another line where ``--muon-tp-mode`` is given: its result is the same, its method is
    not. Without a Muon of Megatron's own only this line is possible.

    Raises:
        ValueError: see ``muon_config``.
    """
    config = muon_config(args)
    lines = []
    if upstreams_values(args):
        values = _values(config, args)
        lines = [
            f"{option} {ours} here, Megatron's own default is {theirs}"
            for option, ours, theirs in values
            if ours != theirs
        ]
    if value_given(args, "muon_tp_mode") is not None:
        lines.append(
            f"--muon-tp-mode {args.muon_tp_mode}: each matrix is orthogonalized once and whole, at "
            "its home, with the same result"
        )
    return lines


def _values(config: MuonConfig, args: Namespace) -> list[tuple[str, object, object]]:
    """(flag, value here, default of Megatron's own Muon) of each setting that both have."""
    own = upstreams_values(args)
    nesterov = "--muon-nesterov" if "muon_nesterov" in own else "--muon-use-nesterov"
    coefficients = spelled(config.ns_coefficients)
    # With TP 1 all modes are the same, so there is no difference to report.
    tp_mode = "duplicated" if _tp_size(args) > 1 else own["muon_tp_mode"]
    return [
        ("--muon-momentum", config.momentum, own["muon_momentum"]),
        (nesterov, config.nesterov, own_nesterov(own)),
        ("--muon-scale-mode", config.scale_mode, own["muon_scale_mode"]),
        ("--muon-extra-scale-factor", config.matched_adamw_rms, own["muon_extra_scale_factor"]),
        ("--muon-num-ns-steps", config.ns_steps, own["muon_num_ns_steps"]),
        ("--muon-coefficient-type", coefficients, own["muon_coefficient_type"]),
        (
            "--muon-ns-dtype",
            config.ns_dtype or AUTO_NS_DTYPE,
            _PRECISIONS.get(own["muon_fp32_matmul_prec"], own["muon_fp32_matmul_prec"]),
        ),
        ("split QKV (--muon-no-split-qkv)", config.split_qkv, own["muon_split_qkv"]),
        ("--muon-tp-mode", tp_mode, own["muon_tp_mode"]),
        ("--weight-decay-all-params", config.weight_decay_all_params, False),
    ]


# --- one setting each ------------------------------------------------------------------------

# With medium, Emerging-Optimizers' newton_schulz casts matrices to bf16. high is TF32, which is not
# supported here: its restarts are not known.
_PRECISIONS = {"medium": "bf16"}


def _factor(args: Namespace, scale_mode: str) -> float:
    rms = value_given(args, "muon_matched_adamw_rms")
    if rms is not None and scale_mode != "spectral":
        raise ValueError(
            f"--muon-matched-adamw-rms {rms} with --muon-scale-mode {scale_mode}: an update has "
            "that root mean square with spectral only; give --muon-extra-scale-factor"
        )
    given = one_meaning(
        ("--muon-matched-adamw-rms", rms, rms),
        ("--muon-extra-scale-factor", *twice(value_given(args, "muon_extra_scale_factor"))),
    )
    if given is not None:
        return float(given)
    moonlights = _MOONLIGHT.matched_adamw_rms if scale_mode == "spectral" else 1.0
    return float(default_value(args, "muon_extra_scale_factor", moonlights))


def _nesterov(args: Namespace) -> bool:
    off = value_given(args, "no_muon_nesterov")
    given = one_meaning(
        ("--muon-nesterov", "(on)", value_given(args, "muon_nesterov")),
        ("--muon-use-nesterov", "(on)", value_given(args, "muon_use_nesterov")),
        ("--no-muon-nesterov", "(off)", None if off is None else not off),
    )
    if given is not None:
        return bool(given)
    own = own_nesterov(upstreams_values(args))
    return own if wants_upstreams(args) else _MOONLIGHT.nesterov


def _ns_steps(args: Namespace) -> int:
    given = one_meaning(
        ("--muon-ns-steps", *twice(value_given(args, "muon_ns_steps"))),
        ("--muon-num-ns-steps", *twice(value_given(args, "muon_num_ns_steps"))),
    )
    return (
        given
        if given is not None
        else default_value(args, "muon_num_ns_steps", _MOONLIGHT.ns_steps)
    )


def _ns_coefficients(args: Namespace) -> Coefficients:
    numbers, name = (
        value_given(args, "muon_ns_coefficients"),
        value_given(args, "muon_coefficient_type"),
    )
    if name == "custom" and numbers is None:
        raise ValueError(
            "--muon-coefficient-type custom: give the numbers, --muon-ns-coefficients 'a,b,c;...'"
        )
    given = one_meaning(
        ("--muon-ns-coefficients", numbers, None if numbers is None else parse(numbers)),
        ("--muon-coefficient-type", name, None if name in (None, "custom") else canonical(name)),
    )
    return given or canonical(default_value(args, "muon_coefficient_type", "simple"))


def _ns_dtype(args: Namespace) -> Any:
    precision, dtype = (value_given(args, f"muon_{n}") for n in ("fp32_matmul_prec", "ns_dtype"))
    if dtype == "auto":
        return None
    given = one_meaning(
        ("--muon-ns-dtype", *twice(dtype)),
        ("--muon-fp32-matmul-prec", precision, _PRECISIONS.get(precision)),
    )
    if given is None and wants_upstreams(args):
        return _PRECISIONS["medium"]  # upstream's default
    return given


def _refuse_what_has_no_meaning(args: Namespace) -> None:
    if value_given(args, "adamw_from_muon"):
        raise ValueError(
            "--adamw-from-muon is for --optimizer adam, and this run has --optimizer muon: leave "
            "it out"
        )
    refuse_value(
        args,
        "muon_fp32_matmul_prec",
        tuple(_PRECISIONS),
        "matrices are multiplied in bf16 (medium) or in fp32 as torch's own switches say, and "
        "the plugin does not set those",
        "give --muon-ns-dtype bf16, fp16 or fp32 in its place",
    )
    refuse_value(
        args,
        "muon_scalar_optimizer",
        ("adam",),
        "what is not Muon's is updated by Megatron's Adam",
        "leave it out",
    )
    refuse_value(
        args,
        "muon_use_syrk",
        (False,),
        "Newton-Schulz's products are torch's here",
        "leave it out",
    )
    if _tp_size(args) > 1:
        _refuse_tp_mode(args)


def _refuse_tp_mode(args: Namespace) -> None:
    """Refuse every mode but duplicated.

    In Emerging-Optimizers, blockwise orthogonalizes each rank's slice as a matrix; distributed
    splits the products of the whole matrix over TP, with an all-reduce per step.
    """
    why = {
        "blockwise": "it orthogonalizes each rank's slice by itself, so the update depends on TP",
        "distributed": "it splits a matrix's products over TP; the result is duplicated's but "
        "for rounding",
    }
    value = value_chosen(args, "muon_tp_mode", "duplicated")
    refuse_value(
        args,
        "muon_tp_mode",
        ("duplicated",),
        f"{why.get(value, 'unknown')}, and here each matrix is orthogonalized once and whole, at "
        "one home",
        "give --muon-tp-mode duplicated, or run with TP 1",
    )


# --- refused ----------------------------------------------------------------------------------


def _refuse_unknown(args: Namespace) -> None:
    known = {flag.dest for flag in FLAGS}
    for dest in own_defaults(args):
        if dest not in known and value_given(args, dest) is not None:
            raise ValueError(
                f"--{dest.replace('_', '-')} {value_given(args, dest)} is a flag of this "
                "Megatron's own Muon that megatron_muon does not know: leave it out, or give "
                "--muon-backend upstream"
            )


def _require_upstreams_defaults(args: Namespace) -> None:
    if wants_upstreams(args) and not upstreams_values(args):
        raise ValueError(
            "--muon-defaults upstream: this Megatron has no Muon of its own (core 0.16 and later "
            "have); give --muon-defaults moonlight or nothing"
        )


def _tp_size(args: Namespace) -> int:
    """The largest number of TP ranks that share a matrix."""
    dense = value_given(args, "tensor_model_parallel_size") or 1
    return max(dense, value_given(args, "expert_tensor_parallel_size") or dense)
