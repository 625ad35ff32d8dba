"""Marks that several files of tests have."""

from __future__ import annotations

import pytest

from support import te_on_cpu
from support.checkpoints.saving import formats

needs_te = pytest.mark.skipif(
    te_on_cpu.TE is None, reason="no Transformer Engine on the path"
)
in_each_format = pytest.mark.parametrize("format", formats())
