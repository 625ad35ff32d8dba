"""Ends processes that are still running after the tests, and fails if there are any.

`python left_running.py MARK`: processes whose environment has MEGATRON_MUON_TESTS=MARK
from their start. Those that end with the run, as workers and fork servers do, have some
seconds for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

NAME = "MEGATRON_MUON_TESTS"
SECONDS = 20.0


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have the mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it has ended
            if process.pid != os.getpid() and process.environ().get(NAME) == mark:
                found.append(process)
    return found


def main(mark: str) -> int:
    """The status to exit with."""
    end = time.monotonic() + SECONDS
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"tests: left running: {process.pid} {' '.join(process.cmdline())}")
            process.kill()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
