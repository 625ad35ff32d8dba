"""A command's end when the reader of its output is gone (``| head``) or a user presses Ctrl-C."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

# A shell's status of a process that SIGPIPE or SIGINT ended: 128 plus the signal's number.
NO_READER, STOPPED = 141, 130


def run_command(command: Callable[[], int]) -> int:
    """Run a command; print no traceback where its reader is gone or a user stops it.

    Characters that stdout's encoding lacks are escaped.

    Args:
        command: returns its exit status, or raises SystemExit as argparse does.

    Returns:
        The command's status, or ``NO_READER`` or ``STOPPED``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # else Python flushes later and prints the error
    except BrokenPipeError:
        broken = [stream for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
        if not broken:
            raise  # another pipe, such as one to a rank
        for stream in broken:
            _discard(stream)
        return NO_READER
    except KeyboardInterrupt:
        print("stopped, with all processes that it started; no result is written", file=sys.stderr)
        return STOPPED


def _has_no_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file of the operating system
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard(stream: TextIO) -> None:
    """Send buffered and future output to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
