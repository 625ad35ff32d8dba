"""``megatron-muon trace``: each of its commands in a module of its own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.lab.dispatch import Commands, dispatch

TRACES: Commands = {
    "run": (
        "megatron_muon.lab.trace.run",
        "trace steps of a training command on every rank, merge the traces, and report",
    ),
    "merge": (
        "megatron_muon.lab.trace.merge",
        "one timeline of all ranks of a pipeline stage, on one clock",
    ),
    "report": (
        "megatron_muon.lab.trace.report",
        "compute, communication, overlap and idle time of one or several runs, side by side",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run a command on traces.

    Args:
        argv: its name and its own arguments.

    Returns:
        The exit status: 0, 1 where a trace cannot be read, 2 where the arguments are wrong.
    """
    return dispatch("megatron-muon trace", TRACES, argv)
