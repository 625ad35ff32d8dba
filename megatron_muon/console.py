"""Lines of a run on stdout, and texts from files for it."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Collection, Sequence


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


# how argparse's message about words that it does not know begins
UNKNOWN = "unrecognized arguments: "


def with_nearest(message: str, flags: Collection[str]) -> str:
    """An error of argparse's that begins with ``UNKNOWN``, with the nearest flags; else
    the error as it is.
    """
    if not message.startswith(UNKNOWN):
        return message
    nearest: dict[str, None] = {}
    for word in message.split():
        if word.startswith("--"):
            flag = word.partition("=")[0]
            nearest |= dict.fromkeys(difflib.get_close_matches(flag, flags, 2))
    return f"{message}; the nearest: {', '.join(nearest)}" if nearest else message
