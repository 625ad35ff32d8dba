"""What tests share: rank workers, the oracle, small models, checkpoints, a virtual GPU."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PYTHON311 = TESTS / "python311"  # on PYTHONPATH where a core wants a newer Python
