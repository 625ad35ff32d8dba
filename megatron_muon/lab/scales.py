"""``megatron-muon scales``: how large updates are, by scale mode, factor and shape."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import get_args

from megatron_muon.config import MuonConfig, ScaleMode
from megatron_muon.lab.dry_run.numbers import count, positive
from megatron_muon.runtime.update import update_scale

_DESCRIPTION = """\
Print a Markdown table of an update's root mean square per unit of lr, for each scale mode and extra
factor. The matrices (outputs × inputs) are square, tall (4:1) and wide (1:4), all of full rank. The
direction is taken as orthogonal, with a root mean square of 1 / sqrt(max(rows, cols)); the singular
values that Newton-Schulz returns are only near 1."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; wrong arguments end the process with status 2, as argparse does.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        print(table(given.hidden_size, given.factor))
    except ValueError as error:
        parser.error(str(error))
    return 0


def table(hidden: int, factors: Sequence[float]) -> str:
    """The table of updates' root mean squares, in Markdown.

    Args:
        hidden: rows and cols of the square matrix.
        factors: extra factors, ``matched_adamw_rms`` of MuonConfig.
    """
    shapes = [(hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    heads = ["scale mode", "extra factor", *(f"{rows} × {cols}" for rows, cols in shapes)]
    lines = [heads, ["---"] * len(heads)]
    for mode in get_args(ScaleMode):
        for factor in factors:
            config = MuonConfig(scale_mode=mode, matched_adamw_rms=factor)
            cells = [f"{update_rms(rows, cols, config):.3g}" for rows, cols in shapes]
            lines.append([f"`{mode}`", f"{factor:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def update_rms(rows: int, cols: int, config: MuonConfig) -> float:
    """Root mean square of a full-rank update per unit of lr, if the direction is orthogonal."""
    return update_scale(rows, cols, config) / math.sqrt(max(rows, cols))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon scales",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hidden-size", type=count(), default=4096, help="rows of the square matrix (%(default)s)"
    )
    parser.add_argument(
        "--factor",
        type=positive,
        nargs="+",
        default=[0.2, 1.0],
        help="values of --muon-extra-scale-factor (default: Moonlight's 0.2, Megatron's own 1.0)",
    )
    return parser
