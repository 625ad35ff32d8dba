"""The Gram iteration: the standard one but for rounding, for less work."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.bench.newton_schulz.inputs import exactly, inputs
from megatron_muon.coefficients import SETS, NsDtype, schedule
from megatron_muon.config import MuonConfig, NsIteration
from megatron_muon.orthogonalize import matmul as products_module
from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import (
    Device,
    ns_flops,
    panels,
    schedule_of,
    segments,
    takes_gram,
)
from megatron_muon.orthogonalize.matmul import (
    KernelError,
    Products,
    plan_device,
    products_on,
    said_of_products,
    scale_of,
    torch_dtype,
    travel_dtype,
    try_products,
)
from megatron_muon.orthogonalize.newton_schulz import (
    orthogonalize,
    standard_iteration,
)
from megatron_muon.orthogonalize.normalization import normalize
from megatron_muon.pricing.presets import H100
from support.expected.oracle import newton_schulz

PAIRS = [(name, steps) for name, found in SETS.items() for steps in found.restarts]
DTYPES = get_args(NsDtype)
FLOAT64 = Products(torch.float64, squares=torch.float64, held=torch.float64)
CPU_DEVICE = torch.device("cpu")
CPU = plan_device(CPU_DEVICE)
PANELS = Products(torch.float64, squares=torch.float64, held=torch.float64, blocked=True)


def _config(name: Any, steps: int, dtype: Any, iteration: Any) -> MuonConfig:
    return MuonConfig(ns_coefficients=name, ns_steps=steps, ns_dtype=dtype, ns_iteration=iteration)


def _matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows + 7 * cols))


@pytest.mark.parametrize("products", [FLOAT64, PANELS], ids=["plain", "panels"])
@pytest.mark.parametrize(("name", "steps"), PAIRS)
def test_gram_is_standard_in_float64(name: Any, steps: int, products: Products) -> None:
    """Wherever it restarts. The square's rounding, 2⁻⁵³ of its norm 1, grows by at most a² a step

    until it is restarted; for the steepest segments here (four steps of 3.4445², ten of aol's) that
    is a factor of 1e6 and its square root times the norm: 1e-7 is far above it, and a wrong term
    gives 1e-1.
    """
    x = normalize(_matrix(24, 400 if products.blocked else 60)).double()
    triples = schedule(name, steps, "fp32")
    exact = standard_iteration(x, triples, FLOAT64)
    for restarts in {
        tuple(range(2, steps, 2)),
        (steps // 2,),
        *filter(None, SETS[name].restarts[steps]),
    }:
        cuts = itertools.pairwise((0, *restarts, steps))
        parts = tuple(triples[start:stop] for start, stop in cuts)
        assert (gram_iteration(x, parts, products) - exact).norm() <= 1e-7 * exact.norm()


@pytest.mark.parametrize(("name", "steps"), PAIRS)
def test_a_folded_step_is_as_accurate(name: Any, steps: int) -> None:
    """A linear term on the square's diagonal rounds once more: at most twice the error, or 64 units

    where that is nearly none, as of all ones. In float64 nothing differs.
    """
    triples, kind = schedule(name, steps, "fp16"), torch.float16
    plain = Products(kind, kind, torch.float32, scale=scale_of("fp16"))
    for shape in ((64, 256), (96, 96)):
        for what, matrix in inputs(*shape):
            exact = exactly(matrix, triples)
            apart, together = (
                (standard_iteration(p.enter(normalize(matrix.float())), triples, p) - exact).norm()
                for p in (plain, replace(plain, folded=True))
            )
            floor = 64 * torch.finfo(kind).eps * exact.norm()
            assert together <= max(2 * apart, floor), what
    x = normalize(_matrix(24, 60)).double()
    folded = replace(FLOAT64, folded=True)
    exact = standard_iteration(x, triples, FLOAT64)
    assert (standard_iteration(x, triples, folded) - exact).norm() <= 1e-11 * exact.norm()


@pytest.mark.parametrize("rows", [383, 384, 401])
def test_panels_are_the_whole_product(rows: int) -> None:
    left, linear = _matrix(rows, 30).double(), _matrix(rows, rows).double()
    linear = linear + linear.mT
    made = PANELS.symmetric(left, left.mT, linear, beta=0.3, alpha=-2.0)
    for start, stop in panels(rows):  # mirrored, not made again
        assert torch.equal(made[:start, start:stop], made[start:stop, :start].mT)
    assert torch.allclose(made, 0.3 * linear - 2 * left @ left.mT, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("rows", "inner"), [(8, 8), (32, 160), (300, 70), (400, 400)])
def test_a_product_in_bf16_rounds_once(rows: int, inner: int) -> None:
    """Also where the CPU makes it in bf16, with its linear term in the same pass. Sums in fp32 are

    2⁻²⁴ × √inner off, against 2⁻⁹ of the rounding: one element in a thousand goes to its neighbour.
    """
    products = products_on(CPU_DEVICE, "bf16")
    left = products.enter(_matrix(rows, inner))
    linear = products.enter(_matrix(rows, rows) + _matrix(rows, rows).mT)
    for make in (products.product, products.symmetric):
        made = products.rounded(make(left, left.mT, linear, beta=0.3, alpha=-2.0))
        exact = 0.3 * linear.double() - 2.0 * left.double() @ left.mT.double()
        assert (made.double() != exact.bfloat16().double()).double().mean() <= 0.01


@pytest.mark.parametrize(
    ("dtype", "folded"), [*((dtype, False) for dtype in DTYPES), ("fp16", True)]
)
@pytest.mark.parametrize(("name", "steps"), PAIRS)
def test_gram_is_as_accurate_as_standard(name: Any, steps: int, dtype: Any, folded: bool) -> None:
    """On matrices of another size than the restarts were found with, all ones too, by the same

    measure, twice the standard iteration's error, and half as much again, since another size
    rounds otherwise. All ones, whose entries round alike, is no input of the method: fp32 may be
    ``ALL_ONES`` off there, where it is 6.6e-5 at most. In fp16 a GPU has linear terms folded.
    """
    try:
        config = _config(name, steps, dtype, "gram")
    except ValueError:
        pytest.skip("refused")
    allowed = {"bf16": 2.0**-4, "fp16": 2.0**-6, "fp32": 2.0**-20}[dtype]
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}[dtype]
    parts, products = segments(config, CPU), products_on(CPU_DEVICE, dtype)
    for what, matrix in inputs(32, 160):
        x = products.enter(normalize(matrix.float()))
        exact = exactly(matrix, schedule_of(config))
        standards = [
            standard_iteration(
                products.enter(x * (factor / products.scale)), schedule_of(config), products
            ).double()
            for factor in (1 - unit, 1.0, 1 + unit)
        ]
        gram = gram_iteration(x, parts, replace(products, folded=folded)).double()
        error = max(float((standard - exact).norm() / exact.norm()) for standard in standards)
        if what == "all ones":
            allowed = max(allowed, ALL_ONES)
        assert float((gram - exact).norm() / exact.norm()) <= 1.5 * max(2 * error, allowed), what
        assert torch.linalg.matrix_norm(gram, 2) <= 1.1 * max(
            float(torch.linalg.matrix_norm(m, 2)) for m in (exact, *standards)
        ), what


ALL_ONES = 2.0**-15
FP32 = [(name, steps) for name, steps in PAIRS if SETS[name].restarts[steps].fp32 is not None]


@pytest.mark.parametrize("shape", [(31, 129), (129, 31), (48, 48), (40, 60), (24, 384)])
@pytest.mark.parametrize(("name", "steps"), FP32)
def test_gram_in_fp32_is_as_near_to_the_oracle_as_standard(
    name: Any, steps: int, shape: tuple[int, int]
) -> None:
    """Over aspect ratios, condition numbers and near rank 1; the oracle has its own polynomials.

    Standard's error is the worst of three: as the matrix is, upside down and from right to left,
    which adds up in other orders. Restarts are found with other sizes, and a CPU adds up in its
    own order: 2.9 and 4.8 times are the most that two kinds of CPU have shown, and 6 are allowed.
    With the restarts of before it was up to 8 times.
    """
    configs = [_config(name, steps, "fp32", iteration) for iteration in ("gram", "standard")]
    for what, wide in inputs(min(shape), max(shape)):
        matrix = (wide if shape[0] <= shape[1] else wide.mT).float()
        exact = newton_schulz(matrix.double(), steps, coefficients=schedule_of(configs[0]))
        turned = [matrix, matrix.flip(0), matrix.flip(1)]
        gram = _distance(orthogonalize(matrix, configs[0]), exact)
        standard = max(
            _distance(orthogonalize(each, configs[1]).flip(dims), exact)
            for each, dims in zip(turned, [(), (0,), (1,)], strict=True)
        )
        least = ALL_ONES if what == "all ones" else 2.0**-21
        assert gram <= 6 * max(standard, least), (what, gram, standard)


def _distance(direction: torch.Tensor, exact: torch.Tensor) -> float:
    return float((direction.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("name", "steps"), FP32)
@pytest.mark.parametrize("device", get_args(Device))
def test_auto_in_fp32_takes_gram_only_for_fewer_flops(
    name: Any, steps: int, device: Device
) -> None:
    auto, standard = (_config(name, steps, "fp32", i) for i in ("auto", "standard"))
    taken = 0
    for short in (64, 384, 1024, 4096):
        for long in (short, 3 * short // 2, 2 * short, 4 * short, 16 * short):
            if takes_gram(short, long, auto, device):
                taken += 1
                flops = [ns_flops(short, long, config, device) for config in (auto, standard)]
                assert flops[0] < flops[1], (short, long)
    assert taken


@pytest.mark.parametrize("iteration", ["standard", "gram", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(30, 120), (120, 30), (1, 9), (7, 1), (400, 800)])
def test_what_comes_out_and_what_it_costs(
    shape: tuple[int, int], dtype: Any, iteration: Any
) -> None:
    """Zero gives zero, directions are in its dtype, twice is the same, flops are torch's."""
    config = _config("simple", 5, dtype, iteration)
    zero = orthogonalize(torch.zeros(shape), config)
    assert torch.equal(zero, torch.zeros(shape, dtype=torch_dtype(dtype)))
    matrix = _matrix(*shape).to(travel_dtype(config))
    with FlopCounterMode(display=False) as counter:
        once = orthogonalize(matrix, config)
    assert counter.get_total_flops() == ns_flops(*shape, config, CPU)
    strided = matrix.mT.contiguous().mT
    assert torch.equal(orthogonalize(strided, config), once)
    assert once.dtype == torch_dtype(dtype)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_of_a_matrix_does_not_matter(dtype: Any, iteration: Any, scale: float) -> None:
    config, matrix = _config("simple", 5, dtype, iteration), _matrix(20, 50).bfloat16().float()
    assert torch.equal(orthogonalize(matrix * scale, config), orthogonalize(matrix, config))


def test_fp16_is_more_accurate_than_bf16() -> None:
    """By its three more digits."""
    errors = {}
    for dtype in ("bf16", "fp16"):
        products = products_on(CPU_DEVICE, dtype)
        x = products.enter(normalize(_matrix(64, 200)))
        triples = schedule("simple", 5, dtype)
        exact = exactly(_matrix(64, 200), triples)
        errors[dtype] = float((standard_iteration(x, triples, products).double() - exact).norm())
    assert 5 < errors["bf16"] / errors["fp16"] < 12


@pytest.mark.parametrize("device", get_args(Device))
@pytest.mark.parametrize("short", [1, 16, 100, 512, 4096])
def test_auto_never_does_more_work(short: int, device: Any) -> None:
    for aspect in (1, 2, 4, 8):
        shape = (short, aspect * short)
        auto, standard, gram = (
            ns_flops(*shape, _config("simple", 5, "bf16", iteration), device)
            for iteration in ("auto", "standard", "gram")
        )
        took = takes_gram(*shape, _config("simple", 5, "bf16", "auto"), device)
        assert auto == (gram if took else standard) <= standard


@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize(("rows", "cols"), [(512, 2048), (2048, 512), (4096, 4096), (520, 1000)])
def test_a_kernels_symmetric_products_are_9_of_16(
    rows: int, cols: int, iteration: NsIteration
) -> None:
    """Whole numbers, near the share that the time model has; of what the kernel does not take, and
    in fp32, all."""
    short, long = min(rows, cols), max(rows, cols)
    for dtype in DTYPES:
        config = _config("simple", 5, dtype, iteration)
        plain, kernel = (ns_flops(rows, cols, config, d) for d in ("cuda", "cuda_symmetric"))  # type: ignore[arg-type]
        parts = len(segments(config, "cuda")) if iteration == "gram" else 5
        symmetric = plain - parts * 2 * short * short * long
        assert symmetric > 0 and symmetric % 8 == 0
        assert kernel == plain - (0 if dtype == "fp32" else symmetric * 7 // 16)
    assert abs(9 / 16 / H100.symmetric_ratio - 1) < 0.03
    config = _config("simple", 5, "bf16", iteration)
    for odd in ((256, 512), (1001, 2048)):
        assert ns_flops(*odd, config, "cuda") == ns_flops(*odd, config, "cuda_symmetric")


def _near_rank_1() -> Iterator[torch.Tensor]:
    """All or eight rows alike, or a block of ones, but for some noise; see the method's inputs."""
    generator = torch.Generator().manual_seed(3)
    for rows, cols in ((16, 64), (40, 120), (64, 256)):
        for rest in (0.3, 0.1, 0.03, 0.01):
            noise = rest * torch.randn(rows, cols, generator=generator)
            row = torch.randn(1, cols, generator=generator)
            block = torch.zeros(rows, cols)
            block[:8, :24] = 1.0
            alike = torch.zeros(rows, cols)
            alike[:8] = row
            yield from (noise + 1.0, noise + block, noise + row, noise + alike)


@pytest.mark.parametrize(
    ("name", "steps", "dtype"),
    [
        (name, steps, dtype)
        for name, steps in PAIRS
        for dtype in DTYPES
        if getattr(SETS[name].restarts[steps], dtype) is not None
    ],
)
def test_nothing_blows_up_near_rank_1(name: Any, steps: int, dtype: NsDtype) -> None:
    """What rounding leaves below zero in the square of X grows from step to step until a restart.
    A list with one restart too few makes 10 to infinity of the largest value."""
    standard, gram = (_config(name, steps, dtype, each) for each in ("standard", "gram"))
    for matrix in _near_rank_1():
        expected, found = (
            torch.linalg.matrix_norm(orthogonalize(matrix, config).double(), 2)
            for config in (standard, gram)
        )
        assert found <= 1.2 * expected


def test_a_librarys_kernel_makes_the_symmetric_products_of_both_iterations() -> None:
    """Of more than one of its tiles and aligned; the kernel's part is played by torch's matmul."""
    shapes: list[tuple[int, ...]] = []

    def kernel(
        left: torch.Tensor,
        right: torch.Tensor,
        linear: torch.Tensor | None,
        beta: float,
        alpha: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        shapes.append(tuple(left.shape))
        made = alpha * (left @ right)
        made = made if linear is None else made + beta * linear
        return made if out is None else out.copy_(made)

    plain = Products(torch.float32, squares=torch.float32, held=torch.float32)
    own = replace(plain, kernel=kernel)
    config = _config("simple", 5, "fp32", "gram")
    squares, whole = (264, 264), (264, 304)
    for rows, cols, used in (
        (264, 304, {whole, squares}),
        (264, 300, {squares}),
        (257, 304, set()),
        (256, 304, set()),
    ):
        x = normalize(torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)))
        for run in (
            lambda x, products: standard_iteration(x, schedule_of(config), products),
            lambda x, products: gram_iteration(x, segments(config, "cuda"), products),
        ):
            shapes.clear()
            bound = 2 * 486 * 304 * 2.0**-24  # see test_newton_schulz.test_fp32_equals_float64
            assert (run(x, own) - run(x, plain)).norm() <= bound
            assert set(shapes) == used


def test_a_librarys_kernel_that_fails_is_an_error_before_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise AttributeError("no such instruction")

    own = replace(products_on(CPU_DEVICE, "bf16"), kernel=fails)
    monkeypatch.setattr(products_module, "products_on", lambda *_: own)
    with pytest.raises(KernelError, match=r"AttributeError: no such instruction.*uninstall it"):
        try_products(CPU_DEVICE, "bf16")


def test_the_kind_of_a_gpu_is_known_by_the_kernel_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the same test of it products are made with the kernel, but for fp32."""
    gpu, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    for installed in (None, lambda *_: torch.zeros(1)):
        monkeypatch.setattr(products_module, "_quack", lambda installed=installed: installed)
        for capability[0] in ((8, 0), (9, 0), (10, 0)):
            products_module._quack_on.cache_clear()
            has = installed is not None and capability[0] >= (9, 0)
            assert plan_device(gpu) == ("cuda_symmetric" if has else "cuda")
            for dtype in DTYPES:
                kernel = products_on(gpu, dtype).kernel
                assert (kernel is installed and has) == (has and dtype != "fp32")
    products_module._quack_on.cache_clear()
    assert plan_device(torch.device("meta")) == "cuda"


def test_a_library_that_cannot_be_imported_is_an_error_and_one_that_is_not_there_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("quack"):
                raise OSError("no libcuda")

    monkeypatch.setattr("sys.meta_path", [Broken(), *sys.meta_path])
    products_module._quack.cache_clear()
    products_module._quack_on.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"OSError: no libcuda.*uninstall it"):
            plan_device(torch.device("cuda", 0))
    finally:
        monkeypatch.undo()
        products_module._quack.cache_clear()
        products_module._quack_on.cache_clear()
    assert plan_device(torch.device("cuda", 0)) == "cuda"


@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])  # both are multiplied in fp32 on a CPU
def test_the_process_cannot_make_fp32_less(dtype: NsDtype, iteration: NsIteration) -> None:
    """As container images do for GPUs; on CPUs with bf16 it is "medium" that would."""
    matrix = torch.randn(256, 512)
    config = _config("simple", 5, dtype, iteration)
    expected = orthogonalize(matrix, config)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(orthogonalize(matrix, config), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("iteration", "said"),
    [("standard", "plain matmul"), ("gram", "diagonal"), ("auto", "in the Gram iteration")],
)
def test_the_log_says_who_makes_them(iteration: NsIteration, said: str) -> None:
    assert said_of_products(CPU_DEVICE, "bf16", iteration).endswith(said)
