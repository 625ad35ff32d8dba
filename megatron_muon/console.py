"""Lines of a run on stdout."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print a line of a run; characters that stdout's encoding lacks are escaped, not an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
