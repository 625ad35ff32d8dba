"""``megatron-muon trace``: where the time of a step goes, from traces of any run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.outputs import add_outputs, parsed, parser_of, write_json
from megatron_muon.lab.tables import print_lines

_DESCRIPTION = """\
Print where the time of a training step goes on each rank: compute,
communication by collective with bytes and bandwidth, the exposed part of it,
idle time, the optimizer's step. Several runs stand side by side.
https://ui.perfetto.dev shows one rank's timeline, or several ranks' ("Open
multiple trace files").

A run is a Chrome trace of torch's profiler (.json, .json.gz), or a folder with
one for each rank: of Megatron's --profile --use-pytorch-profiler, or of any
script over NCCL or gloo.

compute        on a GPU kernels and copies, on a CPU torch's operators
communication  NCCL's kernels, or gloo's events; both wait for other ranks, too
exposed        communication while nothing is computed; the rest is overlapped
idle           neither of them; on a CPU also Python between two operators
optimizer      Megatron's optimizer step, or torch's where that is not marked
MB, GB/s       of the whole buffer: all-gather's output, reduce-scatter's input

Exit status: 0; 1 where a file is no trace or cannot be written; 2 where
arguments are wrong."""


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with 2."""
    parser = parser_of("megatron-muon trace", _DESCRIPTION)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="TRACE", help="a file, or a folder")
    add_outputs(parser)
    args = parsed(parser, argv)
    paths: list[Path] = args.runs
    if paths[0] == Path("report"):  # a verb, which earlier versions need
        paths = paths[1:]
    if not paths:
        parser.error("the following arguments are required: TRACE")
    # what these import is of the extra [lab], which --help does not need
    from megatron_muon.lab.trace.report import as_json, as_text
    from megatron_muon.lab.trace.runs import names_of, read_run

    runs = [
        read_run(path, name) for path, name in zip(paths, names_of(paths), strict=True)
    ]
    write_json(args.json, as_json(runs))
    print_lines([as_text(runs)])
    return 0
