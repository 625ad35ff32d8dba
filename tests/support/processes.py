"""Python in a separate process, which imports from the same places as this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support import ROOT


def environment(*path: Path | str, **more: str) -> dict[str, str]:
    """This one, with ``path`` before the places that this process imports from."""
    places = [*map(str, path), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **more}


def python(
    *words: Path | str,
    path: Sequence[Path | str] = (),
    timeout: float | None = 300,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, whatever its status is."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment(*path, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def printed(*words: Path | str, timeout: float = 300, **more: str) -> str:
    """What ``python WORDS`` prints, which must succeed."""
    done = python(*words, timeout=timeout, **more)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
