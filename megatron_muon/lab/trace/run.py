"""``megatron-muon trace run``: trace steps of a command, merge them, and report on them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.trace.merge import said
from megatron_muon.lab.trace.table import as_text
from megatron_muon.lab.traces.merge import merge
from megatron_muon.lab.traces.runs import names_of, run_times
from megatron_muon.lab.traces.stream import TraceError
from megatron_muon.runtime.step_traces import chosen_steps

_DESCRIPTION = """\
Run a training command with --muon-trace-steps and --muon-trace-dir at its end, then merge the
traces of its ranks and print their report. The command is whatever starts all ranks of this
machine: torchrun with the launcher (-m megatron_muon SCRIPT), a patched checkout's script, or the
quickstart's train.py. On several machines give the two flags yourself, and merge afterwards.

    megatron-muon trace run --steps 5:7 --folder traces torchrun ... -m megatron_muon \\
        pretrain_gpt.py --optimizer muon ..."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0; the status of the training command where that is not 0; 1 where it has left no traces.
        Wrong arguments end the process with 2.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-muon trace run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", required=True, metavar="FIRST:LAST", help="steps, both included")
    parser.add_argument("--folder", type=Path, required=True, help="new or empty, for the traces")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training command")
    given = parser.parse_args(argv)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    folder = given.folder.resolve()
    try:
        chosen_steps(given.steps)
    except ValueError as error:
        parser.error(f"--steps: {error}")
    if not command:
        parser.error("there is no training command")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        parser.error(f"--folder {given.folder}: give a new or empty folder")
    flags = ["--muon-trace-steps", given.steps, "--muon-trace-dir", str(folder)]
    try:
        status = subprocess.run([*command, *flags], check=False).returncode
        if status:
            return status if status > 0 else 128 - status
        print("\n".join(map(said, merge(folder))) + "\n")
        print(as_text([run_times(folder, names_of([folder])[0])]))
    except (TraceError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0
