"""Flags that are errors: they are unknown here, or have no meaning."""

from __future__ import annotations

from argparse import Namespace

from megatron_muon.megatron_lm.flags.table import FLAGS
from megatron_muon.megatron_lm.flags.values import (
    PRECISIONS,
    own_defaults,
    refuse_value,
    tp_size,
    upstreams_values,
    value_chosen,
    value_given,
    wants_upstreams,
)


def require_upstreams_defaults(args: Namespace) -> None:
    if wants_upstreams(args) and not upstreams_values(args):
        raise ValueError(
            "--muon-defaults upstream: this Megatron has no Muon of its own (core 0.16 and later "
            "have); give --muon-defaults moonlight or nothing"
        )


def refuse_unknown(args: Namespace) -> None:
    known = {flag.dest for flag in FLAGS}
    for dest in own_defaults(args):
        if dest not in known and value_given(args, dest) is not None:
            raise ValueError(
                f"--{dest.replace('_', '-')} {value_given(args, dest)} is a flag of this "
                "Megatron's own Muon that megatron_muon does not know: leave it out, or give "
                "--muon-backend upstream"
            )


def refuse_what_has_no_meaning(args: Namespace) -> None:
    if value_given(args, "adamw_from_muon"):
        raise ValueError(
            "--adamw-from-muon is for --optimizer adam, and this run has --optimizer muon: leave "
            "it out"
        )
    refuse_value(
        args,
        "muon_fp32_matmul_prec",
        tuple(PRECISIONS),
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
    if tp_size(args) > 1:
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
