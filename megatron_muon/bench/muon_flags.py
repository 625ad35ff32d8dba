"""Muon's own flags on this package's commands, with the same names as a run's."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from typing import Any, get_args

from megatron_muon.coefficients import Coefficients, NsDtype, parse
from megatron_muon.config import HomePolicy, MuonConfig, NsIteration
from megatron_muon.dry_run.numbers import count, positive

_DEFAULT = MuonConfig()
MOST_STEPS = 1000  # cap on Newton-Schulz steps; sets have 5 to 10


def add_home_flags(group: _ArgumentGroup) -> None:
    """Add the flags for the choice of homes."""
    group.add_argument(
        "--muon-homes", choices=get_args(HomePolicy), default=_DEFAULT.homes, help="%(default)s"
    )
    for name, unit in (("rank-tflops", "TFLOP/s"), ("link-gbytes", "GB/s")):
        default = getattr(_DEFAULT, name.replace("-", "_"))
        group.add_argument(
            f"--muon-{name}", type=positive, default=default, metavar=unit, help="%(default)g"
        )
    group.add_argument(
        "--muon-node-ranks", type=int, default=_DEFAULT.node_ranks, metavar="N", help="%(default)s"
    )


def homes_of(flags: Namespace) -> dict[str, Any]:
    """The settings of MuonConfig that the flags of ``add_home_flags`` give."""
    return {
        "homes": flags.muon_homes,
        "rank_tflops": flags.muon_rank_tflops,
        "link_gbytes": flags.muon_link_gbytes,
        "node_ranks": flags.muon_node_ranks,
    }


def add_newton_schulz_flags(group: _ArgumentGroup) -> None:
    """Add the flags of the Newton-Schulz iteration."""
    group.add_argument(
        "--muon-ns-coefficients",
        type=_coefficients,
        default=_DEFAULT.ns_coefficients,
        help="%(default)s",
    )
    group.add_argument(
        "--muon-ns-iteration",
        choices=get_args(NsIteration),
        default=_DEFAULT.ns_iteration,
        help="auto on a GPU where restarts are known, else standard",
    )
    group.add_argument(
        "--muon-ns-dtype",
        choices=get_args(NsDtype),
        default=_DEFAULT.ns_dtype,
        help="fp16 on a GPU, bf16 on a CPU",
    )
    group.add_argument(
        "--muon-ns-steps",
        "--muon-num-ns-steps",
        type=count(most=MOST_STEPS),
        default=_DEFAULT.ns_steps,
        help="%(default)s",
    )


def _coefficients(text: str) -> Coefficients:
    try:
        return parse(text)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(str(error)) from error


def newton_schulz_of(flags: Namespace) -> dict[str, Any]:
    """The settings of MuonConfig that the flags of ``add_newton_schulz_flags`` give."""
    return {
        name: getattr(flags, f"muon_{name}")
        for name in ("ns_coefficients", "ns_iteration", "ns_dtype", "ns_steps")
    }
