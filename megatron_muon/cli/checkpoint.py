"""``megatron-muon checkpoint inspect``: what a checkpoint has in it, and whether that is all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_muon.cli.checkpoint_report import Report, examine

_DESCRIPTION = """\
Print what wrote a checkpoint, its parameters with their optimizer, their matrices and the norm of
their momentum, the bytes on disk, and whether it is complete. Every tensor is read, one at a time;
neither a GPU nor a process group is needed, and nothing that is pickled in the files is run."""

_STATUS = """\
exit status:
  0  complete, as far as what is in it says
  1  not complete: the last lines say why
  2  wrong arguments, or no checkpoint"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        The exit status, as ``--help`` lists them; wrong arguments end the process with 2.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        report = examine(given.path, hashes=given.hash)
    except FileNotFoundError as error:
        print(f"{parser.prog} inspect: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report), indent=2) if given.json else as_text(report))
    return 1 if report.faults else 0


def as_text(report: Report) -> str:
    """Facts, parameters, bytes, notes, and the verdict."""
    width = max(map(len, report.facts))
    lines = [f"{name:{width}}  {value}" for name, value in report.facts.items()]
    blocks = [lines, _table(report), _sizes(report)]
    blocks.append([f"note: {note}" for note in report.notes])
    blocks.append([f"not complete: {fault}" for fault in report.faults] or ["complete"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _table(report: Report) -> list[str]:
    cells = [("parameter", "shape", "optimizer", "matrices", "momentum's norm")]
    for row in report.parameters:
        shape = " x ".join(map(str, row.shape)) + " (a part)" * row.is_part
        matrices = "-" if row.matrices is None else str(row.matrices)
        norm = "-" if row.norm is None else f"{row.norm:.6g}"
        cells.append((row.name, shape, row.optimizer or "-", matrices, norm))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ] * (len(cells) > 1)


def _sizes(report: Report) -> list[str]:
    width = max(map(len, report.bytes))
    return ["bytes on disk", *(f"  {k:{width}}  {v:>15,}" for k, v in report.bytes.items())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon checkpoint",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["inspect"], help="the only one there is")
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="what --save was given, or one iteration's folder"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--hash", action="store_true", help="compare the hash of every file, too")
    return parser
