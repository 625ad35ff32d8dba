"""What real models' steps cost on a GPU that is not there: launches, waits, memory over state.

``cd tests && python -m support.virtual_gpu.report`` prints all of them.
"""

from __future__ import annotations

import pytest

from megatron_muon.orthogonalize.iteration import scratch_elements
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, LEAST_SCRATCH
from support.virtual_gpu.plans import MODELS
from support.virtual_gpu.report import MIB, ReportRow, rows_of

BY_NAME = {model.name: model for model in MODELS}


def _busiest(name: str, **settings: object) -> ReportRow:
    (row,) = rows_of(BY_NAME[name], first=False, **settings)
    return row


@pytest.mark.parametrize(
    ("name", "largest", "beside", "most"),
    [
        # of a first round the rank's own matrix goes out, 32 MiB, and directions come, 56.25 MiB
        ("Llama-3-8B TP8 DP8", (28672, 4096), 88.25, 569),
        ("Llama-3-70B TP8 PP4 DP16", (57344, 8192), 0, 2253),
    ],
)
def test_a_step_takes_its_round_and_the_scratch_of_its_largest_matrix(
    name: str, largest: tuple[int, int], beside: float, most: int
) -> None:
    """The round is one matrix: it, and its next iterate and squares of its short side; and

    ``beside`` MiB that travel meanwhile.
    """
    row = _busiest(name)
    rows, cols = largest
    scalars = 8 * 512  # flags and norms; a GPU's allocator rounds up
    planned = 2 * (rows * cols + scratch_elements(rows, cols)) + scalars
    assert row.peak_bytes <= min(planned + beside * MIB, most * MIB)
    assert 2 * scratch_elements(rows, cols) <= 1.5 * 2 * rows * cols
    assert row.host_syncs == 0


def test_a_smaller_round_takes_less_memory() -> None:
    """Two rounds' buffers and a batch's scratch; without fused kernels that of elementwise
    operations, too."""
    name, mib = "Llama-3-8B TP1 DP8", 400
    default, smaller = _busiest(name), _busiest(name, round_bytes=mib << 20)
    foreach = _busiest(name, round_bytes=mib << 20, elementwise="foreach")
    planned = 2 * (mib << 20) + 2 * LEAST_SCRATCH
    assert smaller.peak_bytes <= planned + MIB  # a MiB of tables
    assert foreach.peak_bytes <= planned + 4 * ELEMENTS_AT_ONCE
    assert smaller.total("launches") < foreach.total("launches")
    assert smaller.peak_bytes < default.peak_bytes


def test_experts_are_orthogonalized_in_batches() -> None:
    row = _busiest("Qwen3-30B-A3B EP8, 8 ranks")
    assert row.total("launches") <= 4000
    assert row.total("operations") <= 12 * row.matrices
    assert row.host_syncs == 0
