"""Muon trains GPTs of Transformer Engine's own modules, forward and backward, in parallel.

Their autograd functions and FusedAdam are real, and products and norms are the stub's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support import te_on_cpu
from support.installed import VERSION
from support.models.parallel_model import Model, Topology
from support.parallel import differences, trained, truth

pytestmark = [
    pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path"),
    pytest.mark.skipif(VERSION < (0, 16), reason="older ones ask torch for a CUDA device here"),
]

FP32 = Model(optimizer="muon", steps=4)
BF16 = replace(FP32, dtype=torch.bfloat16)
MOE = replace(FP32, moe=True, shared=True, grouped=True)
# Rounding, in another order: of single products in fp32, and of whole layers in bf16.
FAR = {torch.float32: 1e-4, torch.bfloat16: 0.5}


@pytest.mark.parametrize(
    ("m", "t"),
    [
        pytest.param(FP32, Topology(tp=2, pp=2), id="dense"),
        pytest.param(BF16, Topology(tp=2, dp=2, overlap=True), id="bf16"),
        pytest.param(replace(MOE, dtype=torch.bfloat16), Topology(dp=2, ep=2), id="grouped"),
        pytest.param(MOE, Topology(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall"), id="etp"),
        pytest.param(replace(MOE, grouped=False), Topology(dp=2, ep=2), id="sequential"),
        pytest.param(replace(FP32, mla=True), Topology(tp=2, dp=2), id="mla"),
        pytest.param(replace(BF16, mtp=True), Topology(pp=2, dp=2), id="mtp"),
    ],
)
def test_training_is_that_of_one_process(m: Model, t: Topology) -> None:
    one, other = truth(m), trained(m, t)
    far = differences(one, other)
    assert max(far.values()) < FAR[m.dtype], max(far, key=lambda name: far[name])
    assert other.losses[-1] == pytest.approx(
        one.losses[-1], abs=1e-3 if m.dtype.itemsize == 4 else 0.1
    )
