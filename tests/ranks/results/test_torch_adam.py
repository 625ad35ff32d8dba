"""Where Megatron picked torch's own AdamW, without Transformer Engine or Apex."""

from __future__ import annotations

import torch

from support.models.gpt import Case, inner_optimizers, start, trained
from support.models.torch_adam import torchs_own_adam
from support.ranks import run
from support.runs.topologies import ONE, TP2_DP2

CASE = Case()
# torch's AdamW and Transformer Engine's compute one formula in another order: about ten
# fp32 roundings of a number near 1 a step, times lr, in units of the parameter's size.
ROUNDINGS = 10 * CASE.steps * 2.0**-24


def _class() -> str:
    with torchs_own_adam():
        (inner,) = inner_optimizers(start(CASE, ONE).optimizer)
    return type(inner).__name__


def test_muon_runs_over_torchs_own_adamw() -> None:
    """Muon's parameters bitwise as over the fused class; AdamW's within its
    roundings.
    """
    assert run(_class, 1) == ["MuonOverAdamW"]
    over_torchs = trained(CASE, TP2_DP2, torchs_own_adam)
    expected = trained(CASE, TP2_DP2)
    muon = over_torchs["main"].keys() - over_torchs["exp_avg_sq"].keys()
    assert len(muon) == 4 * CASE.layers
    for name, main in over_torchs["main"].items():
        if name in muon:
            assert torch.equal(main, expected["main"][name]), name
        else:
            size = expected["main"][name].abs().max().item()
            torch.testing.assert_close(
                main, expected["main"][name], rtol=0, atol=ROUNDINGS * size
            )
