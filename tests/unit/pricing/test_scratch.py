"""Scratch memory of Newton-Schulz on a CPU is what torch's allocator hands out."""

from __future__ import annotations

import pytest
import torch

from megatron_muon.bench.step.meter import peak_bytes
from megatron_muon.coefficients import NsDtype
from megatron_muon.config import MuonConfig
from megatron_muon.cpu import fused_adam
from megatron_muon.orthogonalize import matmul
from megatron_muon.orthogonalize.iteration import Device
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.planning.segments import Matrix
from megatron_muon.pricing.scratch import of_matrix_on_cpu

CPU = torch.device("cpu")
NUMBERS = 1024  # bytes of single numbers
ONEDNN = 200 * 1024  # of a bf16 product on a thread
SHAPES = [(256, 256, 1, 1), (768, 256, 1, 1), (256, 512, 1, 1), (256, 512, 2, 1), (256, 512, 1, 2)]


@pytest.fixture(params=["cpu", "cpu_bf16"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """This CPU, taken as one of either kind."""
    has_bf16 = request.param == "cpu_bf16"
    monkeypatch.setattr(matmul, "multiplies_bf16", lambda: has_bf16)
    found: Device = matmul.plan_device(CPU)
    assert found == request.param
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_takes_what_is_planned(
    shape: tuple[int, int, int, int], iteration: str, dtype: NsDtype, device: Device
) -> None:
    rows, cols, parts, units = shape
    config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)  # type: ignore[arg-type]
    staged = torch.randn(rows * cols).to(matmul.travel_dtype(config))
    moves = torch.ones(1, dtype=torch.bool)

    def step() -> None:
        orthogonalize_staged(
            staged, moves, config, rows=rows, cols=cols,
            column_parts=parts, column_blocks=units, apart=units > 1,
        )  # fmt: skip

    step()
    matrix = Matrix("w", rows, cols, parts, units, 0, units)
    planned = of_matrix_on_cpu(matrix, config, device)
    held = matmul.products_on(CPU, dtype).held
    left_out = ONEDNN * torch.get_num_threads() if held == torch.bfloat16 else NUMBERS
    assert planned <= peak_bytes(CPU, step) <= planned + left_out


@pytest.mark.parametrize(("elements", "decay"), [(3_000, 0.1), (3_000, 0.0), (3_000_000, 0.1)])
def test_adamw_takes_what_is_planned(elements: int, decay: float) -> None:
    weight = torch.nn.Parameter(torch.randn(elements))
    weight.grad = torch.randn(elements)
    adam = fused_adam.FusedAdam([weight], weight_decay=decay)
    adam.step()
    planned = fused_adam.scratch_bytes(elements, decays=decay != 0)
    assert planned <= peak_bytes(CPU, adam.step) <= planned + NUMBERS
