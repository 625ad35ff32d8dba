"""Scratch memory of Newton-Schulz on a CPU is what torch's allocator hands out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_muon.cpu import fused_adam
from megatron_muon.lab.bench.step.meter import peak_bytes
from megatron_muon.lab.pricing.scratch import of_matrix_on_cpu, of_strips
from megatron_muon.orthogonalize import matmul
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.layout import Strip
from megatron_muon.planning.slices import Matrix
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration
from support.one_home import step_of_home

CPU = torch.device("cpu")
NUMBERS = 1024  # bytes of single numbers
ONEDNN = 200 * 1024  # of a bf16 product on a thread
TRANSPOSED = 60 * 60 * 4  # torch's block of a transposed copy
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
    staged = torch.randn(rows * cols).to(TORCH_DTYPE[Numerics(config).travels])
    moves = torch.ones(1, dtype=torch.bool)

    def step() -> None:
        orthogonalize_staged(
            staged, moves, numerics_on(staged.device, config), rows=rows, cols=cols,
            column_parts=parts, column_blocks=units, apart=units > 1,
        )  # fmt: skip

    step()
    matrix = Matrix("w", rows, cols, parts, units, 0, units)
    planned = of_matrix_on_cpu(matrix, Numerics(config, device))
    held = matmul.products_on(CPU, numerics_on(CPU, MuonConfig(ns_dtype=dtype))).held
    left_out = ONEDNN * torch.get_num_threads() if held == torch.bfloat16 else NUMBERS
    assert planned <= peak_bytes(CPU, step) <= planned + left_out


@pytest.fixture
def one_thread() -> Iterator[None]:
    """oneDNN's memory grows with threads, and would hide that of squares."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("shape", "strips", "ranks", "iteration", "dtype"),
    [
        ((512, 512), 4, 1, "standard", "bf16"),
        ((512, 512), 8, 1, "standard", "bf16"),
        ((512, 512), 16, 1, "standard", "bf16"),
        ((1024, 512), 8, 1, "standard", "bf16"),
        ((512, 512), 16, 1, "standard", "fp32"),
        ((512, 512), 4, 1, "gram", "bf16"),
        ((512, 512), 2, 2, "gram", "fp32"),
        ((512, 512), 5, 3, "gram", "bf16"),
        ((512, 512), 2, 2, "standard", "fp16"),
        ((256, 768), 3, 2, "gram", "bf16"),
        ((2048, 128), 4, 2, "standard", "fp32"),
        ((128, 2048), 4, 1, "gram", "fp16"),
    ],
)
def test_strips_take_what_is_planned(
    shape: tuple[int, int],
    strips: int,
    ranks: int,
    iteration: NsIteration,
    dtype: NsDtype,
    device: Device,
    one_thread: None,
) -> None:
    """On the first rank, which has most strips, with all of a matrix's strips or some of them."""
    config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
    every = _strips(shape, strips, ranks)
    own = [matrix for matrix in every if matrix.home == 0]
    step = step_of_home(0, every, ranks, config)
    step()
    measured = peak_bytes(CPU, step)
    planned = of_strips(own, ranks, Numerics(config, device))
    held = matmul.products_on(CPU, numerics_on(CPU, MuonConfig(ns_dtype=dtype))).held
    by_products = iteration == "gram" and held == torch.bfloat16  # the highest moment may be theirs
    left_out = ONEDNN if by_products else NUMBERS + TRANSPOSED
    assert measured - left_out <= planned <= 1.005 * measured


def _strips(shape: tuple[int, int], count: int, ranks: int) -> list[Matrix]:
    """A matrix in ranges of rows, as ``planning.strips`` cuts it and chooses the homes."""
    rows, cols = shape
    edges = [number * rows // count for number in range(count + 1)]
    return [
        Matrix(
            "w", edges[number + 1] - edges[number], cols, 1, 1, number * ranks // count,
            strip=Strip(rows, cols, number, count),
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(("elements", "decay"), [(3_000, 0.1), (3_000, 0.0), (3_000_000, 0.1)])
def test_adamw_takes_what_is_planned(elements: int, decay: float) -> None:
    weight = torch.nn.Parameter(torch.randn(elements))
    weight.grad = torch.randn(elements)
    adam = fused_adam.FusedAdam([weight], weight_decay=decay)
    adam.step()
    planned = fused_adam.scratch_bytes(elements, decays=decay != 0)
    assert planned <= peak_bytes(CPU, adam.step) <= planned + NUMBERS
