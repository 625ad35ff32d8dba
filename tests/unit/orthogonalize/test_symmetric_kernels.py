"""Symmetric products by triton's kernel: in its interpreter, and by its instructions.

No GPU runs here. Both need triton; without it the tests say that they are skipped.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from support.kernels.compiled import CAPABILITIES, instructions, interpreted

# The instructions of a GPU's matrix units
MULTIPLIES = {80: "mma.sync.", 90: "wgmma.mma_async.", 100: "tcgen05.mma."}


def test_the_interpreter_multiplies_and_mirrors_each_element_once() -> None:
    """Both sides, batches, sizes that are no multiples of a tile, rows that lie apart."""
    assert interpreted("support.kernels.interpreted_symmetric") >= 60


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_operands_are_read_16_bytes_at_once_and_multiplied_by_matrix_units(
    capability: int,
) -> None:
    found = {
        name.removeprefix("symmetric_kernel "): used
        for name, used in instructions(capability).items()
        if name.startswith("symmetric_kernel")
    }
    assert len(found) == 12
    for name, used in found.items():
        assert _number(used, re.escape(MULTIPLIES[capability])), name
        if "in eights" in name:
            assert _number(used, r"cp\.async\.cg\."), name
            assert _number(used, r"st\.global.*\.v4"), name  # 8 numbers of 2 bytes
            assert not _number(used, r"ld\.global\.(b|u)16"), name


def _number(used: Counter[str], form: str) -> int:
    return sum(count for name, count in used.items() if re.match(form, name))
