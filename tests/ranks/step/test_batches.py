"""Several matrices of one shape at once, as a GPU may take them; here the products are
a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_muon.orthogonalize import newton_schulz
from megatron_muon.orthogonalize.matmul import numerics_on, products_on
from megatron_muon.orthogonalize.newton_schulz import (
    at_once_on,
    orthogonalize,
    orthogonalize_at_once,
    orthogonalize_staged,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules import muon as muon_rule
from megatron_muon.settings.config import MuonConfig, NsIteration
from support.models.gpt import Case, stepped
from support.ranks import run
from support.runs.topologies import ONE

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FOUR = MuonConfig(ns_batch=4)


def _matrices(count: int, rows: int, cols: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return [torch.randn(rows, cols, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (1, 7), (400, 420)])
def test_a_matrix_in_a_batch_has_the_bits_that_it_has_alone(
    shape: tuple[int, int], iteration: NsIteration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what rounding amounts to: see test_coefficients.test_fp32_equals_the_oracle,
    twice.
    """
    monkeypatch.setattr(newton_schulz, "takes_batches", lambda device: True)
    config = MuonConfig(ns_dtype="fp32", ns_iteration=iteration)
    matrices = _matrices(3, *shape)
    bound = 2 * 486 * max(shape) * 2.0**-24
    for made, matrix in zip(
        orthogonalize_at_once(matrices, config), matrices, strict=True
    ):
        alone = orthogonalize(matrix, config)
        assert made.shape == alone.shape and made.dtype == alone.dtype
        assert (made - alone).norm() <= bound


def test_matrices_of_a_batch_are_scaled_separately() -> None:
    (matrix,) = _matrices(1, 24, 40)
    exact = 2.0**-90
    first, small, zero = orthogonalize_at_once(
        [matrix, matrix * exact, torch.zeros_like(matrix)], MuonConfig()
    )
    assert torch.equal(first, small) and not zero.any()


def test_deterministic_mode_batches_no_matrices(deterministic: None) -> None:
    assert at_once_on(CUDA, Numerics(FOUR), 8, 8, 0) == 1
    assert at_once_on(CUDA, Numerics(MuonConfig()), 8, 8, 999) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(32, 64), (64, 33), (400, 420)])
def test_a_cpu_batches_small_matrices_with_the_bits_of_single_ones(
    shape: tuple[int, int], iteration: NsIteration, dtype: Any
) -> None:
    """What is not a product, nor rounds one, is done once for all of them, but for
    their norms.
    """
    config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
    matrices = [x * 10.0**n for n, x in enumerate(_matrices(12, *shape))]
    alone = [_Counted.of(orthogonalize, matrix, config) for matrix in matrices]
    made = _Counted.of(orthogonalize_at_once, matrices, config)
    assert all(torch.equal(x, y.made) for x, y in zip(made.made, alone, strict=True))
    assert made.products == 12 * alone[0].products
    if iteration == "standard":  # Gram's diagonals are each matrix's own
        products = products_on(CPU, numerics_on(CPU, config))
        roundings = 0 if products.held == products.dtype else 2 * 11 * alone[0].products
        assert made.others <= alone[0].others + 12 + roundings
    assert at_once_on(CPU, Numerics(FOUR), *shape, 0) == max(
        1, (1 << 18) // (shape[0] * shape[1])
    )


@pytest.mark.parametrize("shape", [(11, 13), (23, 7)])
def test_a_cpu_batches_no_matrices_where_a_batch_would_align_them_differently(
    shape: tuple[int, int],
) -> None:
    """torch multiplies in fp16 by other sums where memory is not aligned."""
    config = MuonConfig(ns_dtype="fp16")
    matrices = list(_matrices(12, *shape))
    alone = [orthogonalize(matrix, config) for matrix in matrices]
    assert all(map(torch.equal, orthogonalize_at_once(matrices, config), alone))
    assert at_once_on(CPU, Numerics(FOUR), *shape, 0) == 1


class _Counted(TorchDispatchMode):
    """Products and other operations, without views, of a call; and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = 0

    @classmethod
    def of(cls, call: Callable[..., Any], *arguments: Any) -> _Counted:
        with cls() as counted:
            counted.made = call(*arguments)
        return counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_product = func.overloadpacket.__name__ in ("mm", "addmm")
        self.products += is_product
        self.others += not is_product and not func.is_view
        return func(*args, **kwargs or {})


def test_by_default_as_many_as_have_scratch_memory_are_taken_at_once() -> None:
    """Beside itself a matrix takes as much again, and two squares of its short side."""
    of_one = 16 * 8 + 2 * 8 * 8
    for most, count in ((3 * of_one, 3), (3 * of_one - 1, 2), (1, 1)):
        assert at_once_on(CUDA, Numerics(MuonConfig()), 16, 8, most) == count
        assert at_once_on(CUDA, Numerics(MuonConfig()), 8, 16, most) == count


def _stepped(case: Case, at_once: int) -> dict[str, Any]:
    sizes: list[int] = []

    def counted(staged: Tensor, moves: Tensor, *rest: Any, **shape: int) -> None:
        sizes.append(len(moves))
        orthogonalize_staged(staged, moves, *rest, **shape)

    with (
        mock.patch.object(muon_rule, "at_once_on", lambda *shape: at_once),
        mock.patch.object(newton_schulz, "takes_batches", lambda device: True),
        mock.patch.object(muon_rule, "orthogonalize_staged", counted),
    ):
        built = stepped(case, ONE, 1)
    flops = [part.muon.meter.ns_flops for part in built.parts]
    planned = [part.muon.plan.ns_flops()[0] for part in built.parts]
    params = {
        name: param.detach().float().clone() for name, param in built.params.items()
    }
    return {"sizes": sizes, "params": params, "flops": flops, "planned": planned}


def test_a_step_in_batches_is_the_step_one_by_one() -> None:
    """One rank with all experts. lr · 0.2 · √max(rows, cols) is at most 1 here, and a
    direction is as near to that of its matrix alone as in
    test_a_matrix_in_a_batch_has_the_bits_that_it_has_alone.
    """
    case = Case(moe=True, bf16=False).with_muon(ns_dtype="fp32")
    (alone,), (batched,) = (run(_stepped, 1, case, at_once) for at_once in (1, 3))
    assert set(alone["sizes"]) == {1} and set(batched["sizes"]) == {1, 2, 3}
    assert sum(alone["sizes"]) == sum(batched["sizes"])
    assert batched["flops"] == alone["flops"] == alone["planned"]
    for name, param in alone["params"].items():
        bound = 2 * 486 * max(param.shape) * 2.0**-24
        assert (batched["params"][name] - param).norm() <= bound, name
