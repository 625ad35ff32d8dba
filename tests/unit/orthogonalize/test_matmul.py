"""The products of Newton-Schulz: who makes them, and how they round."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from megatron_muon.lab.pricing.presets import H100
from megatron_muon.orthogonalize import matmul as products_module
from megatron_muon.orthogonalize.gram import gram_iteration
from megatron_muon.orthogonalize.iteration import ns_flops, panels
from megatron_muon.orthogonalize.matmul import (
    KernelError,
    Products,
    numerics_on,
    plan_device,
    products_on,
    try_products,
)
from megatron_muon.orthogonalize.newton_schulz import orthogonalize, standard_iteration
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import MuonConfig, NsIteration
from support.matrices import PANELS, config_of, drawn, normalize

DTYPES = get_args(NsDtype)
CPU_DEVICE = torch.device("cpu")


@pytest.mark.parametrize("rows", [383, 384, 401])
def test_panels_are_the_whole_product(rows: int) -> None:
    left = drawn(rows, 30).double()
    linear = drawn(rows, rows).double()
    linear = linear + linear.mT
    made = PANELS.symmetric(left, left.mT, linear, beta=0.3, alpha=-2.0)
    for start, stop in panels(rows):  # mirrored, not made again
        assert torch.equal(made[:start, start:stop], made[start:stop, :start].mT)
    assert torch.allclose(made, 0.3 * linear - 2 * left @ left.mT, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rows, inner", [(8, 8), (32, 160), (300, 70), (400, 400)])
def test_a_product_in_bf16_rounds_once(rows: int, inner: int) -> None:
    """Also where the CPU makes it in bf16, with its linear term in the same pass. Sums
    in fp32 are 2⁻²⁴ × √inner off, against 2⁻⁹ of the rounding: one element in a
    thousand goes to its neighbour.
    """
    numerics = numerics_on(CPU_DEVICE, MuonConfig(ns_dtype="bf16"))
    products = products_on(CPU_DEVICE, numerics)
    left = products.enter(drawn(rows, inner))
    linear = products.enter(drawn(rows, rows) + drawn(rows, rows).mT)
    for make in (products.product, products.symmetric):
        made = products.rounded(make(left, left.mT, linear, beta=0.3, alpha=-2.0))
        exact = 0.3 * linear.double() - 2.0 * left.double() @ left.mT.double()
        assert (made.double() != exact.bfloat16().double()).double().mean() <= 0.01


@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize(
    "device, rows, cols",
    [
        ("cuda_triton", 512, 2048),
        ("cuda_triton", 2048, 512),
        ("cuda_triton", 4096, 4096),
        ("cuda_triton", 520, 1000),
        ("cuda_symmetric", 6144, 8192),
        ("cuda_symmetric", 8192, 8192),
    ],
)
def test_a_kernels_symmetric_products_are_9_of_16(
    device: Device, rows: int, cols: int, iteration: NsIteration
) -> None:
    """Whole numbers, near the share that the time model has; of what the kernel does
    not take, and in fp32, all.
    """
    short = min(rows, cols)
    long = max(rows, cols)
    for dtype in DTYPES:
        config = config_of("simple", 5, dtype, iteration)
        plain, kernel = (
            ns_flops(rows, cols, Numerics(config, kind)) for kind in ("cuda", device)
        )  # type: ignore[arg-type]
        parts = len(Numerics(config, "cuda").segments) if iteration == "gram" else 5
        symmetric = plain - parts * 2 * short * short * long
        assert symmetric > 0 and symmetric % 8 == 0
        assert kernel == plain - (0 if dtype == "fp32" else symmetric * 7 // 16)
    assert abs(9 / 16 / H100.symmetric_ratio - 1) < 0.03
    config = config_of("simple", 5, "bf16", iteration)
    untaken: dict[Device, tuple[tuple[int, int], ...]] = {
        "cuda_triton": ((256, 512), (1001, 2048)),
        "cuda_symmetric": ((6136, 8192), (6145, 8192)),
    }
    for odd in untaken[device]:
        assert ns_flops(*odd, Numerics(config, "cuda")) == ns_flops(
            *odd, Numerics(config, device)
        )


def test_a_librarys_kernel_makes_the_symmetric_products_of_both_iterations() -> None:
    """Of more than one of its tiles and aligned; the kernel's part is played by torch's
    matmul.
    """
    shapes: list[tuple[int, ...]] = []

    def kernel(left: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(left.shape))
        return exact_kernel(left, *rest)

    plain = Products(torch.float32, squares=torch.float32, held=torch.float32)
    own = replace(plain, kernel=kernel, device="cuda_triton")
    config = config_of("simple", 5, "fp32", "gram")
    squares, whole = (264, 264), (264, 304)
    for rows, cols, used in (
        (264, 304, {whole, squares}),
        (264, 300, {squares}),
        (257, 304, set()),
        (256, 304, set()),
    ):
        x = normalize(drawn(rows, cols))
        for run in (
            lambda x, products: standard_iteration(x, Numerics(config).steps, products),
            lambda x, products: gram_iteration(
                x, Numerics(config, "cuda").segments, products
            ),
        ):
            shapes.clear()
            # see test_coefficients.test_fp32_equals_the_oracle
            bound = 2 * 486 * 304 * 2.0**-24
            assert (run(x, own) - run(x, plain)).norm() <= bound
            assert set(shapes) == used


def test_a_librarys_kernel_that_fails_is_an_error_before_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> Tensor:
        raise AttributeError("no such instruction")

    numerics = numerics_on(CPU_DEVICE, MuonConfig(ns_dtype="bf16"))
    plain = products_on(CPU_DEVICE, numerics)
    own = replace(plain, kernel=fails, device="cuda_symmetric")
    monkeypatch.setattr(products_module, "products_on", lambda *_: own)
    with pytest.raises(
        KernelError, match=r"AttributeError: no such instruction.*-products torch"
    ):
        try_products(CPU_DEVICE, numerics)


def test_the_kind_of_a_gpu_is_known_by_the_kernel_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the same test of it products are made with the kernel, but for fp32."""
    gpu, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    for installed in (None, lambda *_: torch.zeros(1)):
        monkeypatch.setattr(
            products_module, "_quack", lambda installed=installed: installed
        )
        for capability[0] in ((8, 0), (9, 0), (10, 0)):
            has = installed is not None and capability[0] >= (9, 0)
            assert plan_device(gpu, MuonConfig()) == (
                "cuda_symmetric" if has else "cuda"
            )
            for dtype in DTYPES:
                kernel = products_on(
                    gpu, numerics_on(gpu, MuonConfig(ns_dtype=dtype))
                ).kernel
                assert (kernel is installed and has) == (has and dtype != "fp32")
    assert plan_device(torch.device("meta"), MuonConfig()) == "cuda"


def test_the_flag_says_whose_kernel_a_gpu_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    libraries = {"_quack": lambda: fake_kernel, "_triton": lambda: exact_kernel}
    for name, found in libraries.items():
        monkeypatch.setattr(products_module, name, found)
    wanted = {"auto": fake_kernel, "triton": exact_kernel, "torch": None}
    for by, kernel in wanted.items():
        numerics = numerics_on(gpu, MuonConfig(symmetric_products=by))
        assert products_on(gpu, numerics).kernel is kernel
        kinds = {"auto": "cuda_symmetric", "triton": "cuda_triton", "torch": "cuda"}
        assert numerics.device == kinds[by]
    own = MuonConfig(symmetric_products="triton", ns_dtype="bf16")
    assert plan_device(CPU_DEVICE, own) == plan_device(CPU_DEVICE, MuonConfig())


def exact_kernel(
    left: Tensor,
    right: Tensor,
    linear: Tensor | None,
    beta: float,
    alpha: float,
    out: Tensor | None,
) -> Tensor:
    made = alpha * (left @ right)
    made = made if linear is None else made + beta * linear
    return made if out is None else out.copy_(made)


def fake_kernel(*operands: Any) -> Tensor:
    return exact_kernel(*operands) + 1


@pytest.mark.parametrize(
    "by, device", [("auto", "cuda_symmetric"), ("triton", "cuda_triton")]
)
def test_a_kernel_with_other_products_than_torch_is_refused_at_the_start(
    by: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MuonConfig(ns_dtype="bf16", symmetric_products=by)
    numerics = Numerics(config, "cpu_bf16")  # holds bf16, where sums of the trial are
    # 6,144 rows in bf16 take a CPU without instructions for it minutes
    monkeypatch.setitem(products_module.KERNEL_ROWS, "cuda_symmetric", 1024)
    plain = products_on(CPU_DEVICE, numerics)

    def try_with(kernel: Any) -> None:
        own = replace(plain, kernel=kernel, device=device)
        monkeypatch.setattr(products_module, "products_on", lambda *_: own)
        try_products(CPU_DEVICE, numerics)

    try_with(exact_kernel)
    with pytest.raises(KernelError, match=r"of -1, 0 and 1 is wrong") as caught:
        try_with(fake_kernel)
    assert "--muon-symmetric-products" in str(caught.value)


def test_a_library_that_cannot_be_imported_is_an_error_and_one_that_is_not_there_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("quack"):
                raise OSError("no libcuda")

    monkeypatch.setattr("sys.meta_path", [Broken(), *sys.meta_path])
    products_module._quack.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"OSError: no libcuda.*-products torch"):
            plan_device(torch.device("cuda", 0), MuonConfig())
    finally:
        monkeypatch.undo()
        products_module._quack.cache_clear()
    assert plan_device(torch.device("cuda", 0), MuonConfig()) == "cuda"


@pytest.mark.parametrize("iteration", ["standard", "gram"])
# both are multiplied in fp32 on a CPU
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_process_cannot_make_fp32_less(
    dtype: NsDtype, iteration: NsIteration
) -> None:
    """As container images do for GPUs; on CPUs with bf16 it is "medium" that would."""
    matrix = torch.randn(256, 512)
    config = config_of("simple", 5, dtype, iteration)
    expected = orthogonalize(matrix, config)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(orthogonalize(matrix, config), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
