"""Megatron's own Muon in ``megatron-muon bench step``, where it can be imported."""

from __future__ import annotations

import pytest

from megatron_muon.lab.bench.step.rows import UPSTREAM
from megatron_muon.lab.bench.step.upstream import why_no_upstream
from support.benching import measured, model_and_ranks
from support.ranks import run


@pytest.fixture
def importable() -> None:
    reason = why_no_upstream(model_and_ranks(""))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("importable")
def test_each_mode_of_megatrons_own_muon_does_its_work_on_every_tp_rank() -> None:
    """Whole matrices twice at TP 2, or in halves without a message: other mathematics."""
    names = ["muon-contiguous", *UPSTREAM]
    ranks = run(measured, 4, "--tp 2 --dp 2", names)
    ours, blockwise, duplicated, distributed = (
        sum(rank[name].counted.flops for rank in ranks) for name in names
    )
    assert duplicated == 2 * ours > 0
    assert blockwise < ours < distributed < duplicated
    for rank in ranks:
        kinds = {"param_gather", "grad_reduce", "norm"}
        assert rank["upstream-blockwise"].counted.sent_bytes.keys() == kinds
        for name in UPSTREAM[1:]:
            assert rank[name].counted.sent_bytes.keys() == kinds | {"tp_gather"}
    weights = [{rank[name].weights for rank in ranks} for name in UPSTREAM]
    assert weights[0] != weights[1]
