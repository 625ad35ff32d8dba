"""``megatron-muon checkpoint inspect``: a checkpoint's contents, and whether they are complete."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_muon.files.printable import printable
from megatron_muon.lab.inspect.report import Report, examine

_DESCRIPTION = """\
Print what wrote a checkpoint, its parameters with their optimizer, their matrices and the norm of
their momentum, the bytes on disk, and whether it is complete. Every tensor is read, one at a time;
neither a GPU nor a process group is needed. No byte of the files chooses code that runs: objects
of classes other than plain containers and tensors are not made, and TorchScript is refused."""

_STATUS = """\
exit status:
  0  complete, as far as its files tell
  1  not complete, or damaged: the last lines name each file and what is wrong with it
  2  wrong arguments; or no checkpoint there, or several and no tracker file that names one
  3  this command itself failed, which says nothing about the checkpoint: please report it"""


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
        text = json.dumps(asdict(report), indent=2) if given.json else _printable(as_text(report))
    except OSError as error:
        _fail(parser, str(error))
        return 2
    except Exception as error:
        line = f"{given.path}: {type(error).__name__}: {error}"
        _fail(parser, f"megatron_muon failed, the checkpoint may be whole; please report: {line}")
        return 3
    print(text)
    return 1 if report.faults else 0


def _fail(parser: argparse.ArgumentParser, why: str) -> None:
    line = _printable(" ".join(why.split()))
    print(f"{parser.prog} inspect: error: {line}", file=sys.stderr)


def _printable(text: str) -> str:
    """Escape control characters and those that the output's encoding lacks; keep line breaks."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text, kept="\n").encode(encoding, "backslashreplace").decode(encoding)


def as_text(report: Report) -> str:
    """The report as text: facts, parameters, bytes, notes, and the verdict."""
    width = max(map(len, report.facts))
    lines = [f"{name:{width}}  {_one_line(value)}" for name, value in report.facts.items()]
    blocks = [lines, _table(report), _sizes(report)]
    blocks.append([f"note: {_one_line(note)}" for note in report.notes])
    faults = [f"not complete: {_one_line(fault)}" for fault in report.faults]
    blocks.append(faults or ["complete"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _table(report: Report) -> list[str]:
    cells = [("parameter", "shape", "optimizer", "matrices", "momentum's norm")]
    for row in report.parameters:
        shape = " x ".join(map(str, row.shape)) + " (a part)" * row.is_part
        matrices = "-" if row.matrices is None else str(row.matrices)
        norm = "-" if row.norm is None else f"{row.norm:.6g}"
        cells.append((_one_line(row.name), shape, row.optimizer or "-", matrices, norm))
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ] * (len(cells) > 1)


def _sizes(report: Report) -> list[str]:
    if not report.bytes:
        return []
    width = max(map(len, report.bytes))
    return ["bytes on disk", *(f"  {k:{width}}  {v:>15,}" for k, v in report.bytes.items())]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon checkpoint",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["inspect"], help="the only action")
    parser.add_argument(
        "path", metavar="PATH", type=_path, help="the folder of --save, or one iteration's folder"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--hash", action="store_true", help="compare the hash of every file, too")
    return parser


def _path(text: str) -> Path:
    """A path. An empty text, which would mean the current folder, is refused."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return Path(text)
