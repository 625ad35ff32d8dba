"""The Gram iteration: the standard one but for rounding, for less work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import ns_flops, takes_gram
from megatron_muon.orthogonalize.matmul import (
    TORCH_DTYPE,
    Products,
    plan_device,
    scale_of,
)
from megatron_muon.orthogonalize.newton_schulz import orthogonalize, standard_iteration
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.settings.coefficients import (
    GRAM_ERROR,
    GRAM_LEAST,
    SETS,
    NsDtype,
    schedule,
)
from megatron_muon.settings.config import MuonConfig
from support.drawn import WORST, trials
from support.expected.oracle import newton_schulz
from support.matrices import PANELS, config_of, drawn, exactly, inputs, normalize

PAIRS = [(name, steps) for name, found in SETS.items() for steps in found.restarts]
DTYPES = get_args(NsDtype)
FLOAT64 = Products(torch.float64, squares=torch.float64, held=torch.float64)
CPU_DEVICE = torch.device("cpu")
CPU = plan_device(CPU_DEVICE, MuonConfig())


@pytest.mark.parametrize("products", [FLOAT64, PANELS], ids=["plain", "panels"])
@pytest.mark.parametrize("name, steps", PAIRS)
def test_gram_is_standard_in_float64(name: Any, steps: int, products: Products) -> None:
    """Wherever it restarts. The square's rounding, 2⁻⁵³ of its norm 1, grows by at most
    a² a step until it is restarted; for the steepest segments here (four steps of
    3.4445²) that is a factor of 1e6 and its square root times the norm:
    1e-7 is far above it, and a wrong term gives 1e-1.
    """
    x = normalize(drawn(24, 400 if products.blocked else 60)).double()
    triples = schedule(name, steps)
    exact = standard_iteration(x, triples, FLOAT64)
    for restarts in {
        tuple(range(2, steps, 2)),
        (steps // 2,),
        *filter(None, SETS[name].restarts[steps]),
    }:
        cuts = itertools.pairwise((0, *restarts, steps))
        parts = tuple(triples[start:stop] for start, stop in cuts)
        assert (
            gram_iteration(x, parts, products) - exact
        ).norm() <= 1e-7 * exact.norm()


@pytest.mark.parametrize("name, steps", PAIRS)
def test_a_folded_step_is_as_accurate(name: Any, steps: int) -> None:
    """A linear term on the square's diagonal rounds once more: at most twice the error,
    or 64 units where that is nearly none, as of all ones. In float64 nothing differs.
    """
    triples, kind = schedule(name, steps), torch.float16
    plain = Products(kind, kind, torch.float32, scale=scale_of("fp16"))
    for shape in ((64, 256), (96, 96)):
        for what, matrix in inputs(*shape):
            exact = exactly(matrix, triples)
            apart, together = (
                (
                    standard_iteration(
                        p.enter(p.scale * normalize(matrix.float())), triples, p
                    )
                    - exact
                ).norm()
                for p in (plain, replace(plain, folded=True))
            )
            floor = 64 * torch.finfo(kind).eps * exact.norm()
            assert together <= max(2 * apart, floor), what
    x = normalize(drawn(24, 60)).double()
    folded = replace(FLOAT64, folded=True)
    exact = standard_iteration(x, triples, FLOAT64)
    assert (
        standard_iteration(x, triples, folded) - exact
    ).norm() <= 1e-11 * exact.norm()


FIELDS = [
    (name, steps, field)
    for name, steps in PAIRS
    for field, restarts in SETS[name].restarts[steps]._asdict().items()
    if restarts is not None
]


@pytest.mark.parametrize("name, steps, field", FIELDS)
def test_gram_holds_its_bound_on_the_worst_of_10_000_matrices(
    name: Any, steps: int, field: str
) -> None:
    """Error and largest singular value, as a GPU, this CPU and sums in 16 bits round.

    ``figures.restart_errors`` walks all of them.
    """
    restarts = getattr(SETS[name].restarts[steps], field)
    for trial in trials(name, steps, field, WORST):
        for ratios in trial.measured(restarts):
            assert float(ratios.max()) <= 1, trial.numbers[int(ratios.argmax())]


@pytest.mark.parametrize("steps", [8, 10])
def test_a_matrix_that_became_nan_has_a_direction(steps: int) -> None:
    matrix = torch.tensor(
        [[1.734375, 0.69140625], [-1.2421875, -0.52734375], [-0.330078125, 1.5]]
    )
    gram, standard = (
        orthogonalize(matrix, config_of("polar_express", steps, "bf16", iteration))
        for iteration in ("gram", "standard")
    )
    torch.testing.assert_close(gram, standard, rtol=0, atol=2.0**-6)


FP32 = [
    (name, steps)
    for name, steps in PAIRS
    if SETS[name].restarts[steps].fp32 is not None
]


@pytest.mark.parametrize("shape", [(31, 129), (129, 31), (48, 48), (24, 384)])
@pytest.mark.parametrize("name, steps", FP32)
def test_gram_in_fp32_is_as_near_to_the_oracle_as_standard(
    name: Any, steps: int, shape: tuple[int, int]
) -> None:
    """Over aspect ratios, condition numbers and near rank 1; the oracle has its own
    polynomials.

    Standard's error is the worst of three: as the matrix is, upside down and from right
    to left, which adds up in other orders.
    """
    configs = [
        config_of(name, steps, "fp32", iteration) for iteration in ("gram", "standard")
    ]
    for what, wide in inputs(min(shape), max(shape)):
        matrix = (wide if shape[0] <= shape[1] else wide.mT).float()
        exact = newton_schulz(
            matrix.double(), steps, coefficients=Numerics(configs[0]).steps
        )
        turned = [matrix, matrix.flip(0), matrix.flip(1)]
        gram = _distance(orthogonalize(matrix, configs[0]), exact)
        standard = max(
            _distance(orthogonalize(each, configs[1]).flip(dims), exact)
            for each, dims in zip(turned, [(), (0,), (1,)], strict=True)
        )
        assert gram <= GRAM_ERROR * max(standard, GRAM_LEAST["fp32"]), (
            what,
            gram,
            standard,
        )


def _distance(direction: Tensor, exact: Tensor) -> float:
    return float((direction.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("iteration", ["standard", "gram", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30, 120), (120, 30), (1, 9), (7, 1), (400, 800)])
def test_what_comes_out_and_what_it_costs(
    shape: tuple[int, int], dtype: Any, iteration: Any
) -> None:
    """Zero gives zero, directions are in its dtype, twice is the same, flops are
    torch's.
    """
    config = config_of("simple", 5, dtype, iteration)
    zero = orthogonalize(torch.zeros(shape), config)
    assert torch.equal(zero, torch.zeros(shape, dtype=TORCH_DTYPE[dtype]))
    matrix = drawn(*shape).to(TORCH_DTYPE[Numerics(config).travels])
    with FlopCounterMode(display=False) as counter:
        once = orthogonalize(matrix, config)
    assert counter.get_total_flops() == ns_flops(*shape, Numerics(config, CPU))
    strided = matrix.mT.contiguous().mT
    assert torch.equal(orthogonalize(strided, config), once)
    assert once.dtype == TORCH_DTYPE[dtype]


@pytest.mark.parametrize("device", get_args(Device))
@pytest.mark.parametrize("short", [1, 16, 100, 512, 4096])
def test_auto_never_does_more_work(short: int, device: Any) -> None:
    for aspect in (1, 2, 4, 8):
        shape = (short, aspect * short)
        auto, standard, gram = (
            ns_flops(
                *shape, Numerics(config_of("simple", 5, "bf16", iteration), device)
            )
            for iteration in ("auto", "standard", "gram")
        )
        took = takes_gram(
            *shape, Numerics(config_of("simple", 5, "bf16", "auto"), device)
        )
        assert auto == (gram if took else standard) <= standard
