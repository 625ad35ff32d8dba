"""The ``MuonConfig`` that Megatron-LM's parsed flags ask for."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_muon.megatron_lm.flags.refused import (
    refuse_unknown,
    refuse_what_has_no_meaning,
    require_upstreams_defaults,
)
from megatron_muon.megatron_lm.flags.values import (
    PRECISIONS,
    default_value,
    one_meaning,
    own_nesterov,
    twice,
    upstreams_values,
    value_chosen,
    value_given,
    wants_upstreams,
)
from megatron_muon.settings.coefficients import Coefficients, canonical, parse
from megatron_muon.settings.config import MuonConfig, SplitKind, SplitMatrices

_MOONLIGHT = MuonConfig()


def muon_config(args: Namespace) -> MuonConfig:
    """The settings that parsed flags ask for.

    Args:
        args: result of a parser that ``add_flags`` completed; ``tensor_model_parallel_size`` and
            ``expert_tensor_parallel_size`` are read, too.

    Raises:
        ValueError: a flag, or a default of ``--muon-defaults upstream``, has no meaning here; two
            flags contradict each other; or a setting is out of its range.
    """
    require_upstreams_defaults(args)
    refuse_unknown(args)
    refuse_what_has_no_meaning(args)
    scale_mode = value_chosen(args, "muon_scale_mode", _MOONLIGHT.scale_mode)
    node_ranks = value_given(args, "muon_node_ranks")
    nonfinite_limit = value_given(args, "muon_nonfinite_limit")
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
        node_ranks=_MOONLIGHT.node_ranks if node_ranks is None else node_ranks,
        round_bytes=_round_bytes(args),
        early_param_gather=(
            value_given(args, "muon_early_param_gather") or _MOONLIGHT.early_param_gather
        ),
        checkpoint_digest=not value_given(args, "no_muon_checkpoint_digest"),
        nonfinite_limit=(
            _MOONLIGHT.nonfinite_limit if nonfinite_limit is None else nonfinite_limit
        ),
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
        ("--muon-fp32-matmul-prec", precision, PRECISIONS.get(precision)),
    )
    if given is None and wants_upstreams(args):
        return PRECISIONS["medium"]  # upstream's default
    return given
