"""``megatron-muon trace merge``: one timeline of all ranks of a pipeline stage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.lab.traces.clocks import Clock
from megatron_muon.lab.traces.merge import Merged, merge
from megatron_muon.lab.traces.stream import TraceError

_DESCRIPTION = """\
Write one Chrome trace of all ranks of each pipeline stage into the folder of their traces, as
merged.stageN.json.gz, for https://ui.perfetto.dev. Each rank is a process of it.

Ranks of one machine share a clock. The offset of another clock follows from meetings of all ranks
before and after the traced steps. No rank leaves a meeting before all have come, so each meeting
bounds the offset from both sides. The middle is taken, and printed with how wrong it may be. Traces
without meetings keep their own clocks, and the output says so."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        0, or 1 where a file cannot be read or written; wrong arguments end the process with 2.
    """
    parser = argparse.ArgumentParser(
        prog="megatron-muon trace merge",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the folder with a trace for each rank")
    given = parser.parse_args(argv)
    if not given.folder.is_dir():
        parser.error(f"{given.folder}: there is no such folder")
    try:
        written = merge(given.folder)
    except (TraceError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(said, written)))
    return 0


def said(merged: Merged) -> str:
    """A line about a file, and one for each clock that is not the first's."""
    ranks = ", ".join(str(clock.rank) for clock in merged.clocks)
    return "\n".join([f"{merged.path}: ranks {ranks}", *map(_clock, merged.clocks[1:])])


def _clock(clock: Clock) -> str:
    if clock.within_us is None:
        return f"  rank {clock.rank}: its own clock, nothing tells the offset"
    within = f"within {clock.within_us:.1f} us"
    if clock.how == "same machine":
        return f"  rank {clock.rank}: the first rank's machine and clock, which meetings bear out"
    return f"  rank {clock.rank}: clock moved by {-clock.offset_us:.1f} us, {within}, by meetings"
