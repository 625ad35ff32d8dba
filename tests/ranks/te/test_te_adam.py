"""The CPU runtime's FusedAdam is Transformer Engine's, bit for bit, in what its Python
decides.

Which states there are, what a group's step is, what is saved and what is refused is
their real Python; the formula is the stub's, written after their kernel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon.cpu.fused_adam import FusedAdam as Ours
from support import te_on_cpu
from support.marks import needs_te

pytestmark = needs_te

NUMBERS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
STEPS_OF_EMPTY_GROUPS = te_on_cpu.TE is not None and te_on_cpu.TE >= (2, 19)
Params = list[torch.nn.Parameter]


def _theirs() -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam


def _stepped(adam: Any, dtype: torch.dtype, decoupled: bool) -> tuple[Params, Any]:
    """Five steps of three parameters; one has no gradient in the first of them."""
    g = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(1000, generator=g).to(dtype)) for _ in range(3)
    ]
    groups = [
        {"params": params[:2], "weight_decay": 0.1},
        {"params": params[2:], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.3},
    ]
    optimizer = adam(groups, adam_w_mode=decoupled, **NUMBERS)
    for step in range(5):
        for index, param in enumerate(params):
            grad = torch.randn(1000, generator=g).to(dtype) * 10.0**-index
            param.grad = None if (step, index) == (0, 1) else grad
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_and_state_are_the_same_bits(dtype: torch.dtype, decoupled: bool) -> None:
    theirs, their_adam = _stepped(_theirs(), dtype, decoupled)
    ours, our_adam = _stepped(Ours, dtype, decoupled)
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one, other)
        states = their_adam.state[one], our_adam.state[other]
        assert states[0].keys() == states[1].keys() == {"exp_avg", "exp_avg_sq"}
        for key in states[0]:
            assert states[0][key].dtype is states[1][key].dtype is torch.float32
            assert torch.equal(states[0][key], states[1][key])


def test_what_is_saved_is_the_same() -> None:
    saved = [
        _stepped(adam, torch.float32, True)[1].state_dict()
        for adam in (_theirs(), Ours)
    ]
    theirs, ours = (each["param_groups"] for each in saved)
    if not STEPS_OF_EMPTY_GROUPS:
        assert "step" not in theirs[2] and ours[2].pop("step") == 5
    assert theirs == ours
    assert saved[0]["state"].keys() == saved[1]["state"].keys()


def test_a_float8_tensor_is_on_cuda_by_its_type() -> None:
    """Megatron sorts parameters by that name, and the CPU runtime answers."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    quantizer = Float8Quantizer(
        scale=torch.ones(1), amax=torch.zeros(1), fp8_dtype=tex.DType.kFloat8E4M3
    )
    param = torch.nn.Parameter(quantizer(torch.randn(4, 4).bfloat16()))
    assert param.type() == "torch.cuda.BFloat16Tensor"
