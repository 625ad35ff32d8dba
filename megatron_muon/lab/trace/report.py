"""``megatron-muon trace report``: where the time of a step goes, from torch profiler's traces."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.plan.charts import require_outputs
from megatron_muon.lab.trace.table import as_json, as_text
from megatron_muon.lab.traces.lanes import lanes
from megatron_muon.lab.traces.rank_trace import read
from megatron_muon.lab.traces.runs import files_of, names_of, run_times
from megatron_muon.lab.traces.stream import TraceError

_DESCRIPTION = """\
Print where the time of a training step goes on each rank: compute, communication by collective
with its bytes and bandwidth, the part of it that compute overlaps and the exposed rest, idle time,
the optimizer's share. Several runs stand side by side, with ratios to the first.

A run is a Chrome trace of torch's profiler (.json or .json.gz), or a folder with one for each
rank: of `megatron-muon trace`, or of any other script over NCCL or gloo."""

_EPILOG = """\
compute        on a GPU kernels and copies, on a CPU torch's operators
communication  NCCL's kernels, or gloo's own events; both wait for other ranks, too
exposed        communication while nothing is computed; the rest is overlapped
idle           neither of them; on a CPU also Python between two operators
optimizer      within Megatron's optimizer step, or torch's Optimizer.step where that is not marked
MB, GB/s       of the whole buffer: an all-gather's output, a reduce-scatter's input
bus GB/s       what a rank sends, with the factors of nccl-tests

Exit status: 0; 1 where a file is no trace or cannot be written; 2 where the arguments are wrong."""


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
        require_outputs(given)
    except ValueError as error:
        parser.error(str(error))
    try:
        names = names_of(given.runs)
        runs = [run_times(path, name) for path, name in zip(given.runs, names, strict=True)]
        if given.json is not None:
            given.json.write_text(json.dumps(as_json(runs), indent=1) + "\n")
        if given.plot is not None:
            from megatron_muon.lab.trace.figure import draw

            draw(runs, [lanes(read(files_of(path)[0])) for path in given.runs], given.plot)
    except (TraceError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print(as_text(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon trace report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="TRACE", help="a file, or a folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON, too")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a bar for each rank, and a step of each run's first rank; needs matplotlib",
    )
    return parser
