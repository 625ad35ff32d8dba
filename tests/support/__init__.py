"""Shared by tests: rank workers, the oracle, small models, checkpoints, a virtual
GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PYTHON311 = TESTS / "python311"  # on PYTHONPATH where a core wants a newer Python


def written(root: Path, files: Mapping[str, str]) -> Path:
    """The folder, with these texts by their paths in it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root
