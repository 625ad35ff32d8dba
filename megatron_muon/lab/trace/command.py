"""``megatron-muon trace``: report on torch profiler's traces of any run, and merge them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.console import printable
from megatron_muon.lab.outputs import require_outputs
from megatron_muon.lab.trace.events import TraceError
from megatron_muon.lab.trace.merge import merge
from megatron_muon.lab.trace.report import as_json, as_text
from megatron_muon.lab.trace.runs import names_of, read_run

_DESCRIPTION = """\
report prints where the time of a training step goes on each rank: compute,
communication by collective with bytes and bandwidth, the part of it that
compute overlaps and the exposed rest, idle time, the optimizer's share. Several
runs stand side by side, with ratios to the first. merge writes one trace of all
ranks of each pipeline stage, on one clock, for https://ui.perfetto.dev.

A run is a Chrome trace of torch's profiler (.json, .json.gz), or a folder with
one for each rank: of --muon-trace-steps, or of any script over NCCL or gloo.

compute        on a GPU kernels and copies, on a CPU torch's operators
communication  NCCL's kernels, or gloo's events; both wait for other ranks, too
exposed        communication while nothing is computed; the rest is overlapped
idle           neither of them; on a CPU also Python between two operators
optimizer      Megatron's optimizer step, or torch's where that is not marked
MB, GB/s       of the whole buffer: all-gather's output, reduce-scatter's input
bus GB/s       what a rank sends, with the factors of nccl-tests

Exit status: 0; 1 where a file is no trace or cannot be written; 2 where
arguments are wrong."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0, or 1 where a file cannot be read or written; wrong arguments end the process with 2.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-muon trace",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("verb", choices=("report", "merge"))
    add("runs", nargs="+", type=Path, metavar="TRACE", help="a file, or a folder")
    add("--json", type=Path, metavar="FILE", help="report all figures as JSON, too")
    add("--plot", type=Path, metavar="FILE", help="draw each rank's bar, and a step of each run")
    given = parser.parse_args(argv)
    try:
        if given.verb == "report":
            require_outputs(given)
        elif len(given.runs) > 1 or not given.runs[0].is_dir():
            raise ValueError("merge takes one folder")
    except ValueError as error:
        parser.error(str(error))
    try:
        text = _merged(given.runs[0]) if given.verb == "merge" else _reported(given)
    except (TraceError, OSError) as error:
        print(f"{parser.prog}: error: {printable(str(error))}", file=sys.stderr)
        return 1
    print(printable(text, kept="\n"))
    return 0


def _reported(given: argparse.Namespace) -> str:
    names = names_of(given.runs)
    runs = [read_run(path, name) for path, name in zip(given.runs, names, strict=True)]
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(runs), indent=1) + "\n")
    if given.plot is not None:
        from megatron_muon.lab.trace.figure import draw

        draw(runs, given.plot)
    return as_text(runs)


def _merged(folder: Path) -> str:
    lines = []
    for path, clocks in merge(folder).items():
        lines.append(f"{path}: ranks {', '.join(str(clock.rank) for clock in clocks)}")
        for clock in clocks[1:]:
            told = "the first rank's machine and clock, which meetings bear out"
            if clock.within_us is None:
                told = "its own clock, nothing tells the offset"
            elif clock.how == "meetings":
                by = f"{-clock.offset_us:.1f} us, within {clock.within_us:.1f} us"
                told = f"clock moved by {by}, by meetings"
            lines.append(f"  rank {clock.rank}: {told}")
    return "\n".join(lines)
