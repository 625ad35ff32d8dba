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
from megatron_muon.lab.tables import listed, print_lines, wrapped
from megatron_muon.mcore.checkpoint.matrices import in_words

if TYPE_CHECKING:
    from megatron_muon.lab.inspect.report import Report

_DESCRIPTION = """\
Print what wrote a checkpoint, the matrices that Muon had, and whether it is
complete: its digest, held against the sizes of its files, with --hash against
every byte. No GPU and no process group are needed. Nothing is
unpickled, so no name in a file chooses code that runs."""

_STATUS = """\
exit status:
  0  complete, by its digest; or without a digest, and then nothing is checked
  1  not complete, or damaged: the last lines say why
  2  wrong arguments; or no checkpoint there, or several and no tracker file
  3  this command itself failed"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status, as ``--help`` lists them."""
    parser = _parser()
    words = list(argv)
    if "inspect" in words:  # the verb may be given, since earlier versions need it
        words.remove("inspect")
    args = parser.parse_args(words)
    # torch, which --help does not need
    from megatron_muon.lab.inspect.report import examine

    try:
        report = examine(args.path, hashes=args.hash)
        text = json.dumps(asdict(report), indent=2) if args.json else as_text(report)
    except OSError as error:
        status = 2
        why = str(error)
    except Exception as error:
        status = 3
        why = (
            "megatron_muon failed, the checkpoint may be whole; please report: "
            f"{args.path}: {type(error).__name__}: {error}"
        )
    else:
        print_lines([text])
        return 1 if report.faults else 0
    line = printable(" ".join(why.split()))
    print(f"{parser.prog}: error: {line}", file=sys.stderr)
    return status


def as_text(report: Report) -> str:
    """The report as text: facts, parameters, and the verdict."""
    facts = [(name, _one_line(fact)) for name, fact in report.facts.items()]
    cells = [("weight", "Muon's matrices in it")]
    for name, matrices in report.matrices.items():
        cells.append((_one_line(name), in_words(matrices)))
    verdict: list[str] = []
    for fault in report.faults:
        verdict += wrapped(f"not complete: {_one_line(fault)}")
    if not report.has_digest:
        verdict = ["no digest: AdamW's, or saved without"]
    blocks = [listed(facts), listed(cells) if report.matrices else []]
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
