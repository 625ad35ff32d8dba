"""Python in a separate process, which imports from the same places as this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_muon.lab.commands import main
from support import ROOT


def environment(*path: Path | str, **more: str) -> dict[str, str]:
    """This one, with ``path`` before the places that this process imports from."""
    places = [*map(str, path), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), **more}


def report_of(*words: str) -> dict[str, Any]:
    """What ``megatron-muon WORDS --json`` writes, run in this process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        assert main([*words, "--json", str(file)]) == 0
        report: dict[str, Any] = json.loads(file.read_text())
    return report


def without_launcher(**more: str) -> dict[str, str]:
    """``environment`` as of a shell: no launcher's variables, and no GPU."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "CUDA_")
    own = {k: v for k, v in environment().items() if not k.startswith(launcher)}
    return {**own, "CUDA_VISIBLE_DEVICES": "", **more}


def ended(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has ended, with what it wrote, whatever its status is."""
    return subprocess.run([*map(str, words)], capture_output=True, text=True, **options)


def succeeded(*words: object, **options: Any) -> str:
    """What a command prints, which must succeed."""
    done = ended(*words, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def python(
    *words: Path | str,
    path: Sequence[Path | str] = (),
    timeout: float | None = 300,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS``, whatever its status is."""
    env = environment(*path, **more)
    return ended(sys.executable, *words, cwd=ROOT, env=env, timeout=timeout)


def printed(*words: Path | str, timeout: float = 300, **more: str) -> str:
    """What ``python WORDS`` prints, which must succeed."""
    env = environment(**more)
    return succeeded(sys.executable, *words, cwd=ROOT, env=env, timeout=timeout)
