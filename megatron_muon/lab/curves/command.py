"""``megatron-muon curves``: the steps that runs need for the same losses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon.console import printable
from megatron_muon.lab.outputs import add_outputs, parsed, parser_of, write_json
from megatron_muon.lab.tables import aligned

_DESCRIPTION = """\
Compare the loss curves of two or more runs with the first: final losses, and
the leading ratio (S - s) / s over training.

A RUN is NAME=FILE, or NAME=FILE,FILE,... with one file for each seed. A file is
a folder with TensorBoard's event files, or a Megatron log.

S, s           the steps at which the first and the other run first have a loss
leading ratio  0.5: the first run needs half as many steps more; "never": the
               loss is not reached
(a to b)       the smallest and the largest of all pairs of seeds; without it
               the median is shown
a curve        means of blocks of 2 % of a training curve's points, or of
               --window, then the nearest non-increasing curve

It compares runs as they were: with a decaying schedule the first run is at its
end where the other still has a high rate.

Exit status: 0; 1 where a file has no curve or cannot be written; 2 where
arguments are wrong."""


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with 2."""
    parser = parser_of("megatron-muon curves", _DESCRIPTION)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="the first one is the baseline")
    tag = "name of a loss; KIND is train, validation or other"
    add("--tag", action="append", default=[], metavar="KIND=NAME", help=tag)
    window = (
        "average blocks of this part of a curve's points (0.02 for training "
        "curves, else 0)"
    )
    add("--window", type=float, metavar="PART", help=window)
    add_outputs(parser, plot="losses and leading ratios")
    args = parsed(parser, argv)
    # what these import is of the extra [lab], which --help does not need
    from megatron_muon.lab.curves.compare import compare
    from megatron_muon.lab.curves.files import KINDS, read_curves

    files = dict(map(_files, args.runs))
    tags = dict(tag.partition("=")[::2] for tag in args.tag)
    if len(files) < 2 or len(files) < len(args.runs):
        parser.error("give two runs or more, of different names: NAME=FILE")
    if args.window is not None and not 0 <= args.window <= 0.5:
        parser.error(
            f"--window {args.window}: it is a part of the points from 0 to 0.5"
        )
    if not set(tags) <= set(KINDS) or not all(tags.values()):
        parser.error(f"--tag is KIND=NAME, with a kind of {', '.join(KINDS)}")
    runs = {
        name: [read_curves(path, tags) for path in paths]
        for name, paths in files.items()
    }
    found = compare(runs, args.window)
    write_json(args.json, found)
    if args.plot is not None:
        from megatron_muon.lab.curves.figure import draw

        draw(runs, found, args.plot)
    print(printable("\n\n".join(_tables(found)), kept="\n"))
    return 0


def _files(run: str) -> tuple[str, list[Path]]:
    name, equals, files = run.partition("=")
    if not equals or not name or "/" in name:
        name = Path(run.split(",")[0]).stem
        files = run
    paths = [files] if Path(files).exists() else files.split(",")
    return name, [Path(path) for path in paths]


def _tables(found: dict[str, Any]) -> list[str]:
    blocks = []
    for kind, figures in found.items():
        ends = []
        for run in figures["runs"]:
            losses = run["losses"]
            ends.append(
                {
                    "run": run["name"],
                    "seeds": len(losses),
                    "steps": f"{run['steps']:g}",
                    "last loss": _spread(statistics.median(losses), losses, ".4f"),
                    "not finite": run["dropped"],
                }
            )
        blocks += [f"{kind} loss", _table(ends)]
        first = figures["runs"][0]["name"]
        for other in figures["beside_first"]:
            names = (f"S, {first}", f"s, {other['name']}")
            blocks.append(_table([_lead(*names, lead) for lead in other["leads"]]))
    return blocks


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [[str(cell) for cell in row.values()] for row in rows]
    return "\n".join(aligned([list(rows[0]), *cells]))


def _lead(first: str, other: str, lead: dict[str, Any]) -> dict[str, str]:
    reached = None if lead["ratio"] is None else statistics.median(lead["reached"])
    return {
        first: f"{lead['step']:.1f}",
        "loss": f"{lead['loss']:.4f}",
        other: _spread(reached, lead["reached"], ".1f"),
        "leading ratio": _spread(lead["ratio"], lead["ratios"], ".2f"),
        "pairs never": f"{lead['pairs'] - len(lead['reached'])} of {lead['pairs']}",
    }


def _spread(middle: float | None, values: Sequence[float], shape: str) -> str:
    if middle is None:
        return "never"
    around = f" ({min(values):{shape}} to {max(values):{shape}})"
    return f"{middle:{shape}}{around if len(values) > 1 else ''}"
