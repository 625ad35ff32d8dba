"""Lines of a run on stdout, and texts from files for it."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a line of a run; characters that stdout's encoding lacks are escaped, not an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def printable(text: str, kept: str = "") -> str:
    """A text whose control characters are escaped, except those in ``kept``."""
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )
