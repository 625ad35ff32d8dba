"""Where Megatron picked torch's own AdamW, without Transformer Engine or Apex."""

from __future__ import annotations

from typing import Any

import torch

from support.models.gpt import Case, Topology, held, start, take_step
from support.models.torch_adam import torchs_own_adam
from support.ranks import run
from support.runs.whole import whole

CASE = Case(layers=2, steps=3)
# torch's AdamW and Transformer Engine's compute one formula in another order: about ten fp32
# roundings of a number near 1 a step, times lr, in units of the parameter's size.
ROUNDINGS = 10 * CASE.steps * 2.0**-24


def _train_with_torch_adam(topology: Topology) -> dict[str, Any]:
    with torchs_own_adam():
        built = start(CASE, topology)
        for step in range(CASE.steps):
            take_step(built, step)
    inner = built.optimizer.chained_optimizers[0].optimizer
    return {**held(built), "class": type(inner).__name__}


def _train(topology: Topology) -> dict[str, Any]:
    built = start(CASE, topology)
    for step in range(CASE.steps):
        take_step(built, step)
    return held(built)


def test_muon_runs_over_torchs_own_adamw() -> None:
    """Muon's parameters bitwise as over the fused class; AdamW's within its roundings."""
    topology = Topology(tp=2, dp=2)
    results = run(_train_with_torch_adam, topology.world_size, topology)
    assert {result["class"] for result in results} == {"MuonOverAdamW"}
    over_torchs, expected = whole(results), whole(run(_train, topology.world_size, topology))
    muon = over_torchs["main"].keys() - over_torchs["exp_avg_sq"].keys()
    assert len(muon) == 4 * CASE.layers
    for name, main in over_torchs["main"].items():
        if name in muon:
            assert torch.equal(main, expected["main"][name]), name
        else:
            size = expected["main"][name].abs().max().item()
            torch.testing.assert_close(main, expected["main"][name], rtol=0, atol=ROUNDINGS * size)
