"""Lines of a run on stdout, and texts from files for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def say(line: str) -> None:
    """Print a line of a run; characters that stdout's encoding lacks are escaped, not
    an error.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def say_once(line: str) -> None:
    """``say``, by rank 0 of the processes that a launcher has started."""
    if int(os.environ.get("RANK", "0")) == 0:
        say(line)


def first_names(names: Sequence[str], most: int = 3) -> str:
    """Some of the names, and how many more there are: ``a, b, c and 9 more``; "" for
    none.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def printable(text: str, kept: str = "") -> str:
    """A text whose control characters are escaped, except those in ``kept``."""
    return "".join(
        each
        if each.isprintable() or each in kept
        else each.encode("unicode_escape").decode()
        for each in text
    )
