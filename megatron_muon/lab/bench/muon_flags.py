"""Muon's own flags on this package's commands, with the same names as a run's."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from typing import Any, get_args

from megatron_muon.lab.dry_run.numbers import count, positive
from megatron_muon.settings.coefficients import Coefficients, NsDtype, parse
from megatron_muon.settings.config import HomePolicy, MuonConfig, NsIteration

_DEFAULT = MuonConfig()
MOST_STEPS = 1000  # cap on Newton-Schulz steps; sets have 5 to 10


def add_home_flags(group: _ArgumentGroup) -> None:
    """Add the flags for the choice of homes."""
    group.add_argument(
        "--muon-homes",
        choices=get_args(HomePolicy),
        default=_DEFAULT.homes,
        help="choice of the rank that orthogonalizes a matrix (%(default)s)",
    )
    group.add_argument(
        "--muon-rank-tflops",
        type=positive,
        default=_DEFAULT.rank_tflops,
        metavar="TFLOP/s",
        help="a rank's speed of Newton-Schulz, for that choice (%(default)g)",
    )
    group.add_argument(
        "--muon-link-gbytes",
        type=positive,
        default=_DEFAULT.link_gbytes,
        metavar="GB/s",
        help="a rank's speed of the exchange, for that choice (%(default)g)",
    )
    group.add_argument(
        "--muon-node-ranks",
        type=count(),
        default=_DEFAULT.node_ranks,
        metavar="N",
        help="ranks of a node, for that choice (%(default)s)",
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
        help="polynomials: a set's name, or numbers a,b,c;a,b,c;... (%(default)s)",
    )
    group.add_argument(
        "--muon-ns-iteration",
        choices=get_args(NsIteration),
        default=_DEFAULT.ns_iteration,
        help="default: auto on a GPU, standard on a CPU",
    )
    group.add_argument(
        "--muon-ns-dtype",
        choices=get_args(NsDtype),
        default=_DEFAULT.ns_dtype,
        help="dtype of products (default: fp16 on a GPU, bf16 on a CPU)",
    )
    group.add_argument(
        "--muon-ns-steps",
        "--muon-num-ns-steps",
        type=count(most=MOST_STEPS),
        default=_DEFAULT.ns_steps,
        help="Newton-Schulz iterations (%(default)s)",
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
