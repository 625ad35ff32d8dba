"""Muon trains GPTs of Transformer Engine's own modules, forward and backward, in
parallel.

Their autograd functions and FusedAdam are real, and products and norms are the stub's.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.installed import VERSION
from support.marks import needs_te
from support.runs.training import MODEL, differences, rows, trained, truth

pytestmark = [
    needs_te,
    pytest.mark.skipif(
        VERSION < (0, 16), reason="older ones ask torch for a CUDA device here"
    ),
]

FP32 = replace(MODEL, optimizer="muon", steps=4)
BF16 = replace(FP32, bf16=True)
MOE = replace(FP32, moe=True, grouped="te")
BIASES = replace(MOE, shared=False, expert_biases=True)  # gpt-oss's
# Rounding, in another order: of single products in fp32, and of whole layers in bf16.
FAR = {False: 1e-4, True: 0.5}


CASES = {
    "fp32": FP32,
    "bf16": BF16,
    "experts": MOE,
    "experts in bf16": replace(MOE, bf16=True),
    "sequential experts": replace(MOE, grouped=""),
    "mla": replace(FP32, mla="duplicated"),
    "mtp": replace(BF16, mtp=True),
}


@pytest.mark.parametrize(
    "name, ranks",
    rows(
        """
        fp32: tp2 pp2
        bf16: tp2 dp2 overlap
        experts in bf16: dp2 ep2
        experts: tp2 dp2 ep2 etp2 alltoall
        sequential experts: dp2 ep2
        mla: tp2 dp2
        mtp: pp2 dp2
        """
    ),
)
def test_training_is_that_of_one_process(name: str, ranks: str) -> None:
    m = CASES[name]
    one = truth(m)
    other = trained(m, ranks)
    far = differences(one, other)
    assert max(far.values()) < FAR[m.bf16], max(far, key=lambda name: far[name])
    assert other.losses[-1] == pytest.approx(
        one.losses[-1], abs=0.1 if m.bf16 else 1e-3
    )


def test_biases_of_grouped_experts_have_one_processs_gradients() -> None:
    """They have no mark by which Megatron would add them up over TP ranks."""
    other = trained(BIASES, "tp2 ep2 alltoall")
    far = differences(truth(BIASES), other)
    assert max(far.values()) < FAR[False], max(far, key=lambda name: far[name])
