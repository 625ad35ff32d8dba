"""How the settings differ from the defaults of Megatron's own Muon."""

from __future__ import annotations

from argparse import Namespace

from megatron_muon.megatron_lm.flags.settings import muon_config
from megatron_muon.megatron_lm.flags.table import AUTO_NS_DTYPE
from megatron_muon.megatron_lm.flags.values import (
    PRECISIONS,
    own_nesterov,
    tp_size,
    upstreams_values,
    value_given,
)
from megatron_muon.settings.coefficients import spelled
from megatron_muon.settings.config import MuonConfig


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
    tp_mode = "duplicated" if tp_size(args) > 1 else own["muon_tp_mode"]
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
            PRECISIONS.get(own["muon_fp32_matmul_prec"], own["muon_fp32_matmul_prec"]),
        ),
        ("split QKV (--muon-no-split-qkv)", config.split_qkv, own["muon_split_qkv"]),
        ("--muon-tp-mode", tp_mode, own["muon_tp_mode"]),
        ("--weight-decay-all-params", config.weight_decay_all_params, False),
    ]
