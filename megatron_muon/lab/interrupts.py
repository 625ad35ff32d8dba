"""A command's end when the reader of its output is gone (``| head``) or a user presses
Ctrl-C.
"""

from __future__ import annotations

import gc
import io
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

# A shell's status of a process that SIGPIPE or SIGINT ended: 128 plus the signal's
# number.
NO_READER, STOPPED = 141, 130


def run_command(command: Callable[[], int]) -> int:
    """The status of a command, or ``NO_READER`` or ``STOPPED`` without a traceback.

    Characters that stdout's encoding lacks are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # else Python flushes later and prints the error
    except BrokenPipeError:
        broken = [
            stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)
        ]
        if not broken:
            raise  # another pipe, such as one to a rank
        for stream in broken:  # what is buffered and comes goes to /dev/null
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        return NO_READER
    except KeyboardInterrupt:
        # else Python looks through all objects of torch and Megatron as it ends, which
        # takes seconds
        gc.freeze()
        print(
            "stopped, with all processes that it started; no result is written",
            file=sys.stderr,
        )
        return STOPPED


def _has_no_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file of the operating system
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
