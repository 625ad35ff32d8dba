"""Megatron's own Muon in ``megatron-muon bench step``, where it can be imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.lab.bench.step.measure import Measured, StepJob, measure
from megatron_muon.lab.bench.step.rows import UPSTREAM
from megatron_muon.lab.bench.step.upstream import why_no_upstream
from support.benching import model_and_ranks
from support.installed import VERSION
from support.ranks import run


@pytest.fixture
def importable() -> None:
    reason = why_no_upstream(model_and_ranks(""))
    if reason is not None:
        pytest.skip(reason)


def _measured(arguments: str, names: list[str]) -> dict[str, Measured]:
    from megatron_muon.lab.bench.step.rows import rows

    chosen = rows(MuonConfig(), names)
    measured = measure(StepJob(model_and_ranks(arguments), tuple(chosen), 1))
    return {row.name: one for row, one in zip(chosen, measured, strict=True)}


@pytest.mark.usefixtures("importable")
def test_each_mode_of_megatrons_own_muon_does_its_work_on_every_tp_rank() -> None:
    """Whole matrices twice at TP 2, or in halves without a message: other mathematics."""
    names = ["muon-contiguous", *UPSTREAM]
    ranks = run(_measured, 4, "--tp 2 --dp 2", names)
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


def _directions(name: str) -> dict[str, torch.Tensor]:
    """On one rank, by parameter: what a first step makes of Muon's main parameters."""
    from megatron_muon.lab.bench.step import measure
    from megatron_muon.lab.bench.step.build import build
    from megatron_muon.lab.bench.step.meter import StepTimers
    from megatron_muon.lab.bench.step.rows import rows

    (row, *_) = rows(MuonConfig(), [name])
    flags = model_and_ranks("--tp 1 --dp 1")
    device = measure.start_megatron(flags)
    noise = torch.randn(measure.NOISE, generator=torch.Generator().manual_seed(1)) / 50
    watch = StepTimers(device)
    contender: Any = measure._Contender(row, build(row, flags, watch), watch, noise)
    contender.park()
    contender.wake()
    names = {param: key for key, param in contender._params()}
    mains = {
        names[param]: main
        for param, main, _ in measure.main_params(contender._optimizer)
        if param.dim() == 2 and not getattr(param, "is_embedding_or_output_parameter", False)
    }
    before = {key: main.clone() for key, main in mains.items()}
    contender._step()
    return {key: (main - before[key]).flatten() for key, main in mains.items()}


@pytest.mark.usefixtures("importable")
def test_megatrons_own_muon_runs_the_coefficients_of_the_other_rows() -> None:
    """Its own, quintic, end a quarter away from ours, rounding alone less than a fiftieth."""
    (ours,), (theirs,) = (run(_directions, 1, f"{name}") for name in _COMPARED)
    assert ours.keys() == theirs.keys() and len(ours) == 4
    for key, direction in ours.items():
        assert (direction - theirs[key]).norm() < 0.02 * direction.norm(), key


_COMPARED = ("muon-contiguous", "upstream-duplicated")


def test_why_megatrons_own_muon_is_left_out_is_said_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = str(why_no_upstream(model_and_ranks("")))
    if VERSION < (0, 16):
        assert "has no Muon of its own" in reason
        return
    wanted = {16: "0.1", 17: "0.1", 18: "0.2", 19: "0.2", 20: "0.3"}[VERSION[1]]
    assert "absl is not importable" in reason and f"absl-py and v{wanted}.0 of https://" in reason
    several = model_and_ranks("--dp 4 --num-distributed-optimizer-instances 2")
    assert "leave --num-distributed-optimizer-instances out" in str(why_no_upstream(several))
