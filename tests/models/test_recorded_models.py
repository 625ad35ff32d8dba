"""What real models' steps cost on a GPU that is not there: launches, waits, memory over
state.

``cd tests && python -m support.virtual_gpu.report`` prints all of them.
"""

from __future__ import annotations

from itertools import accumulate

import pytest

from megatron_muon.orthogonalize.iteration import scratch_elements
from megatron_muon.planning.rounds.cut import ELEMENTS_AT_ONCE, LEAST_SCRATCH
from megatron_muon.planning.rounds.table import round_tables
from support.models.model_flags import DEEPSEEK_V3
from support.virtual_gpu.plans import MODELS, Model, plans_of
from support.virtual_gpu.report import MIB, TORCHS, ReportRow, row_of

BY_NAME = {model.name: model for model in MODELS}


PLANS = (*MODELS, Model("DeepSeek-V3", " ".join(DEEPSEEK_V3), stage=1))


@pytest.mark.parametrize("strips", [None, 2, 4, 8])
@pytest.mark.parametrize("model", PLANS, ids=lambda model: model.name)
def test_every_message_and_every_run_in_it_starts_at_16_bytes(
    model: Model, strips: int | None
) -> None:
    """NCCL copies what does not one byte a load; the momentum kernel, one element.

    Nor is a strip's side no multiple of 8, which tensor cores need.
    """
    ends = []
    for _, plan in plans_of(
        model, **({} if strips is None else {"split_matrices": strips})
    )[1]:
        assert [m for m in plan.matrices if m.strip is not None and m.long % 8] == []
        for rank in range(0, plan.size, 7):
            for table in round_tables(plan.for_rank(rank), plan.matrices):
                directions = table.results.counts, table.returned.counts
                for counts in (table.sent.counts, table.received.counts, *directions):
                    ends += accumulate(elements for _, elements in counts)
                for sizes in (
                    table.sent.sizes,
                    table.received.sizes,
                    table.returned.sizes,
                ):
                    ends += accumulate(sizes)
                ends += accumulate(table.kept_sizes)
                flags = (*table.sent.flags, *table.received.flags)
                assert all(at - 1 in flags or at % 8 == 0 for at in flags)
    assert ends
    assert [end for end in ends if end % 8] == []


def _busiest(name: str, **settings: object) -> ReportRow:
    row = row_of(BY_NAME[name], **settings)
    assert row.peak_bytes("host ahead") == row.peak_bytes()
    return row


@pytest.mark.parametrize(
    "name, largest, beside, most",
    [
        # of a first round the rank's own matrix goes out, 32 MiB, and directions come,
        # 56.25 MiB
        ("Llama-3-8B TP8 DP8", (28672, 4096), 88.25, 569),
        ("Llama-3-70B TP8 PP4 DP16", (57344, 8192), 0, 2253),
    ],
)
def test_a_step_takes_its_round_and_the_scratch_of_its_largest_matrix(
    name: str, largest: tuple[int, int], beside: float, most: int
) -> None:
    """The round is one matrix: it, and its next iterate and squares of its short side;
    and ``beside`` MiB that travel meanwhile.
    """
    row = _busiest(name)
    rows, cols = largest
    scalars = 8 * 512  # flags and norms; a GPU's allocator rounds up
    planned = 2 * (rows * cols + scratch_elements(rows, cols)) + scalars
    assert row.peak_bytes() <= min(planned + beside * MIB, most * MIB)
    assert 2 * scratch_elements(rows, cols) <= 1.5 * 2 * rows * cols
    assert not any(each.host_syncs for each in row.recordings)
    # of all rounds, of which there are two or three
    assert row.peak_bytes(TORCHS) >= 1.6 * row.peak_bytes()


def test_a_smaller_round_takes_less_memory() -> None:
    """Two rounds' buffers and a batch's scratch; without fused kernels that of
    elementwise operations, too.
    """
    name, mib = "Llama-3-8B TP1 DP8", 400
    default = _busiest(name)
    smaller = _busiest(name, round_bytes=mib << 20)
    foreach = _busiest(name, round_bytes=mib << 20, elementwise="foreach")
    planned = 2 * (mib << 20) + 2 * LEAST_SCRATCH
    assert smaller.peak_bytes() <= planned + MIB  # a MiB of tables
    assert foreach.peak_bytes() <= planned + 4 * ELEMENTS_AT_ONCE
    assert smaller.launches < foreach.launches
    assert smaller.peak_bytes() < default.peak_bytes()


def test_deterministic_mode_fills_what_a_step_has_not_written(
    deterministic: None,
) -> None:
    """Beside more products, one at a time; what this costs is in
    docs/performance.md.
    """
    row = _busiest("Llama-3-8B TP1 DP8", split_matrices="off")
    fills = row.recordings[0].launches_by("name")["fill_empty"]
    assert (fills, row.launches) == (55, 1280)


def test_experts_are_orthogonalized_in_batches() -> None:
    row = _busiest("Qwen3-30B-A3B EP8, 8 ranks")
    assert row.launches <= 4000
    assert sum(len(r.operations) for r in row.recordings) <= 12 * row.matrices
    assert not any(each.host_syncs for each in row.recordings)
