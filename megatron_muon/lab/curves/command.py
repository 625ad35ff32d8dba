"""``megatron-muon curves``: the steps that runs need for the same losses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.curves.comparison import compare
from megatron_muon.lab.curves.curve import KINDS, CurveError, Kind
from megatron_muon.lab.curves.lead import USUAL_WINDOW
from megatron_muon.lab.curves.runs import read_run
from megatron_muon.lab.curves.table import as_json, as_text
from megatron_muon.lab.plan.charts import require_outputs

_DESCRIPTION = """\
Compare the loss curves of two or more runs with the first: final losses, the leading ratio
(S - s) / s over training, and the steps that the first run needs for each loss of another.

A RUN is NAME=FILE, or NAME=FILE,FILE,... with one file for each seed. A file is a folder with
TensorBoard's event files, a Megatron log, CSV, JSON lines, or the quickstart's JSON."""

_EPILOG = """\
S, s           the first run reaches a loss at step S, the other one at step s
leading ratio  0.5: the first run needs half as many steps more; "never": the loss is not reached
(a to b)       the smallest and the largest of all pairs of seeds; without it the median is shown
a curve        means of blocks of 2 % of a training curve's points, or of --window, then the
               non-increasing curve nearest to them in least squares

A ratio that hangs on the window is said to. It compares runs as they were: with a decaying
schedule the first run is at its end where the other one still has a high rate.

Exit status: 0; 1 where a file has no curve or cannot be written; 2 where arguments are wrong."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0, or 1 where a file cannot be read or written; wrong arguments end the process with 2.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        _check(given)
        names = [_name(each) for each in given.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"two runs have one name among {', '.join(names)}: give NAME=FILE")
        tags = dict(_tag(each) for each in given.tag)
    except ValueError as error:
        parser.error(str(error))
    try:
        runs = [read_run(n, _paths(r), tags) for n, r in zip(names, given.runs, strict=True)]
        comparisons = compare(runs, given.window)
        if given.json is not None:
            given.json.write_text(json.dumps(as_json(comparisons), indent=1) + "\n")
        if given.plot is not None:
            from megatron_muon.lab.curves.figure import draw

            draw(runs, comparisons, given.plot)
    except (CurveError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print(as_text(comparisons))
    return 0


def _name(run: str) -> str:
    name, equals, _ = run.partition("=")
    return name if equals and name and "/" not in name else Path(run.split(",")[0]).stem


def _paths(run: str) -> list[Path]:
    name, equals, rest = run.partition("=")
    files = rest if equals and name and "/" not in name else run
    return [Path(files)] if Path(files).exists() else [Path(each) for each in files.split(",")]


def _tag(text: str) -> tuple[Kind, str]:
    kind, equals, name = text.partition("=")
    if not equals or not name or kind not in KINDS:
        raise ValueError(f"--tag {text}: it is KIND=NAME, with a kind of {', '.join(KINDS)}")
    return kind, name


def _check(given: argparse.Namespace) -> None:
    if len(given.runs) < 2:
        raise ValueError("give two runs or more")
    if given.window is not None and not 0 <= given.window <= 0.5:
        raise ValueError(f"--window {given.window}: it is a part of the points from 0 to 0.5")
    require_outputs(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon curves",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the first one is the baseline")
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        metavar="KIND=NAME",
        help="name of a loss: its tag, column or key; KIND is train, validation or other (text "
        "from elsewhere); by default it is found",
    )
    parser.add_argument(
        "--window",
        type=float,
        default=None,
        metavar="PART",
        help="average blocks of this part of a curve's points; default: "
        f"{USUAL_WINDOW} for training curves, none for others",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON, too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw losses and leading ratios; needs matplotlib"
    )
    return parser
