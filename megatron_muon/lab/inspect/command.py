"""``megatron-muon checkpoint``: a checkpoint's contents, and whether they are
complete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_muon.console import printable
from megatron_muon.lab.outputs import parser_of
from megatron_muon.lab.tables import listed, wrapped

if TYPE_CHECKING:
    from megatron_muon.lab.inspect.report import Report

_DESCRIPTION = """\
Print what wrote a checkpoint, its parameters with their optimizer, and whether
it is complete: its digest, held against the sizes of its files, with --hash
against every byte. No GPU and no process group are needed. Nothing is
unpickled, so no name in a file chooses code that runs."""

_STATUS = """\
exit status:
  0  complete, by its digest
  1  not complete, damaged or without a digest: the last lines say why
  2  wrong arguments; or no checkpoint there, or several and no tracker file
  3  this command itself failed"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status, as ``--help`` lists them."""
    parser = _parser()
    words = list(argv)
    if "inspect" in words:  # the verb may be given, since earlier versions need it
        words.remove("inspect")
    given = parser.parse_args(words)
    status, text = _examined(given)
    if status < 2:
        print(text)
    else:
        line = _printable(" ".join(text.split()))
        print(f"{parser.prog}: error: {line}", file=sys.stderr)
    return status


def _examined(given: argparse.Namespace) -> tuple[int, str]:
    """The exit status, and the report or an error."""
    # torch, which --help does not need
    from megatron_muon.lab.inspect.report import examine

    try:
        report = examine(given.path, hashes=given.hash)
    except OSError as error:
        return 2, str(error)
    except Exception as error:
        line = f"{given.path}: {type(error).__name__}: {error}"
        return (
            3,
            f"megatron_muon failed, the checkpoint may be whole; please report: {line}",
        )
    text = (
        json.dumps(asdict(report), indent=2)
        if given.json
        else _printable(as_text(report))
    )
    return int(bool(report.faults)), text


def _printable(text: str) -> str:
    """Escape control characters and those that the output's encoding lacks; keep line
    breaks.
    """
    encoding = sys.stdout.encoding or "utf-8"
    return (
        printable(text, kept="\n").encode(encoding, "backslashreplace").decode(encoding)
    )


def as_text(report: Report) -> str:
    """The report as text: facts, parameters, and the verdict."""
    facts = [(name, _one_line(fact)) for name, fact in report.facts.items()]
    cells = [("parameter", "shape", "optimizer")]
    for name, entry in report.parameters.items():
        shape = " x ".join(map(str, entry["shape"]))
        cells.append((_one_line(name), shape, _one_line(entry["optimizer"])))
    verdict: list[str] = []
    for fault in report.faults:
        verdict += wrapped(f"not complete: {_one_line(fault)}")
    blocks = [listed(facts), listed(cells) if report.parameters else []]
    blocks.append(verdict or ["complete"])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("megatron-muon checkpoint", _DESCRIPTION, epilog=_STATUS)
    parser.add_argument(
        "path",
        metavar="PATH",
        type=_path,
        help="the folder of --save, or one iteration's folder",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--hash", action="store_true", help="compare the hash of every file, too"
    )
    return parser


def _path(text: str) -> Path:
    """A path. An empty text, which would mean the current folder, is refused."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return Path(text)
