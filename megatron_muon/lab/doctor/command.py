"""``megatron-muon doctor``: whether Muon would run here, on what, and why not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.doctor.rows import Examined, examine

_DESCRIPTION = """\
Print what a run with --optimizer muon would find here: versions, the hooks in Megatron, which Adam
updates what is not Muon's, which options are refused, GPU or CPU. Megatron is imported as a run
would import it; nothing is built and no process group is made."""

_STATUS = """\
exit status:
  0  Muon would run
  1  it would not: the last lines say why
  2  wrong arguments"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        The exit status, as ``--help`` lists them; wrong arguments end the process with 2.
    """
    given = _parser().parse_args(argv)
    checkout: Path | None = given.checkout
    if checkout is not None:
        if not (checkout / "megatron" / "training").is_dir():
            text = "is no Megatron-LM checkout: give the folder that pretrain_gpt.py is in"
            print(f"megatron-muon doctor: error: {checkout} {text}", file=sys.stderr)
            return 1
        checkout = checkout.resolve()
    rows = examine(checkout)
    print(as_json(rows) if given.json else as_text(rows))
    return 1 if any(row.fault for row in rows) else 0


def as_text(rows: Sequence[Examined]) -> str:
    """The checks as text: a line per row, then the verdict."""
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:{width}}  {row.value}" for row in rows]
    faults = [row.fault for row in rows if row.fault]
    verdict = [f"Muon would not run: {fault}" for fault in faults] or ["Muon would run."]
    return "\n".join([*lines, "", *verdict])


def as_json(rows: Sequence[Examined]) -> str:
    """The checks as one JSON object; ``faults`` is empty where Muon would run."""
    faults = [row.fault for row in rows if row.fault]
    values = {row.name: row.value for row in rows}
    return json.dumps({"runs": not faults, "faults": faults, **values}, indent=2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon doctor",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkout",
        metavar="CHECKOUT",
        nargs="?",
        type=Path,
        help="Megatron-LM's folder with pretrain_gpt.py (default: the Megatron that Python finds)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
