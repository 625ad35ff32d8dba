"""Which matrices the auto iteration gives to Gram: by the time model, what 0.2.0 chose.

``expected/auto_iteration.json`` has the choices of 0.2.0: by device, by coefficient set,
steps and dtype, and by short side the least long side with Gram; none where a short side
is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from figures.priced_models import CASES, Case
from figures.stages import stage_of
from megatron_muon.lab.pricing.hardware import Hardware
from megatron_muon.lab.pricing.kernels import newton_schulz
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.orthogonalize.iteration import (
    fits_kernel,
    scratch_elements,
    takes_gram,
)
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.planning.rounds.cut import LEAST_SCRATCH
from megatron_muon.settings.config import MuonConfig, NsIteration
from support import expected

CHOSEN = json.loads(
    Path(expected.__file__).with_name("auto_iteration.json").read_text("utf-8")
)
SLOWER = 1.02
# Of the priced models, and of experts of other published ones; powers of two beside.
MODELS = """
1024x4096 4096x4096 4096x14336 4096x28672 1024x8192 8192x8192 8192x28672 3584x4096
128x2048 512x2048 1536x2048 768x2048 2048x4096 256x7168 576x7168 1536x7168 4096x7168
2048x7168 7168x16384 7168x18432 1536x24576 512x32768 1408x2048 2688x4096 2880x2880
1856x2688 1024x2688 2688x5376
"""
ASPECTS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
SHORT = """
64 96 192 264 320 384 448 576 640 704 896 1002 1152 1280 1792 2560 3072 5120 6144 12288
"""
CUDAS = pytest.mark.parametrize("device", ["cuda", "cuda_symmetric", "cuda_triton"])


def _numerics(kind: str, iteration: NsIteration, device: Device) -> Numerics:
    name, steps, dtype = kind.split()
    config = MuonConfig(
        ns_coefficients=name,  # type: ignore[arg-type]
        ns_steps=int(steps),
        ns_dtype=dtype,  # type: ignore[arg-type]
        ns_iteration=iteration,
    )
    return Numerics(config, device)


def _took_gram(device: Device, kind: str, rows: int, cols: int) -> bool:
    """Whether 0.2.0 gave this matrix to Gram; its short side is one of the file's.

    It took quack-kernels from 264 rows on, as triton's kernel is taken now.
    """
    short = min(rows, cols)
    has = fits_kernel(short, short, device)
    least = CHOSEN["cuda_symmetric" if has else "cuda"][kind].get(str(short))
    return least is not None and max(rows, cols) >= least


def _batches(rows: int, cols: int) -> list[int]:
    """One matrix, a few, and as many as a round's scratch memory takes."""
    limit = max(3 * rows * cols // 2, LEAST_SCRATCH)
    most = max(1, limit // scratch_elements(rows, cols))
    return sorted({min(batch, most) for batch in (1, 2, 16, most)})


def _by_tiles(short: int) -> Hardware:
    """A kernel that makes whole tiles of 256 rows up to the diagonal: small matrices
    gain less.
    """
    tiles = -(-short // 256)
    ratio = max(H100.symmetric_ratio, (tiles + 1) / (2 * tiles))
    return H100.with_values({"symmetric_ratio": ratio}, "the test")


@cache
def _gram_by_standard(device: Device, kind: str, rows: int, cols: int) -> list[float]:
    """Gram's time by standard's, of batches of several sizes."""
    hardwares = {H100}
    if device != "cuda":
        hardwares.add(_by_tiles(min(rows, cols)))
    gram = _numerics(kind, "gram", device)
    standard = _numerics(kind, "standard", device)
    ratios: list[float] = []
    for hardware in hardwares:
        for batch in _batches(rows, cols):
            shape = hardware, rows, cols, batch
            time = newton_schulz(*shape, gram).seconds
            ratios.append(time / newton_schulz(*shape, standard).seconds)
    return ratios


@CUDAS
def test_no_shape_of_a_model_is_more_than_two_percent_slower_than_with_0_2_0(
    device: Device,
) -> None:
    """In any set, number of steps, dtype and batch."""
    slower = {}
    for kind in CHOSEN["cuda"]:
        numerics = _numerics(kind, "auto", device)
        for rows, cols in _grid():
            ratios = _gram_by_standard(device, kind, rows, cols)
            takes = takes_gram(rows, cols, numerics)
            if takes == _took_gram(device, kind, rows, cols):
                continue
            time = max(ratios) if takes else 1 / min(ratios)
            if time > SLOWER:
                slower[kind, rows, cols] = round(time, 2)
    assert slower == {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_priced_models_with_another_iteration_than_in_0_2_0(case: Case) -> None:
    """With the preset fast: one matrix, DeepSeek-V3's router."""
    other: set[tuple[Device, tuple[int, int]]] = set()
    devices: tuple[Device, ...] = "cuda", "cuda_symmetric"
    _, optimizers = stage_of(f"{case.words} --muon-preset fast")
    units = {m.unit for one in optimizers for m in one.plan.matrices}
    for device in devices:
        numerics = Numerics(MuonConfig(preset="fast"), device)
        other |= {
            (device, unit)
            for unit in units
            if takes_gram(*unit, numerics) != _took_gram(device, "simple 5 fp16", *unit)
        }
    router = (256, 7168)
    is_deepseek = case.name.startswith("DeepSeek")
    assert other == ({(one, router) for one in devices} if is_deepseek else set())
    for device in devices:
        assert max(_gram_by_standard(device, "simple 5 fp16", *router)) < SLOWER


@CUDAS
def test_auto_is_seldom_slower_than_standard_between_the_shapes_of_models(
    device: Device,
) -> None:
    """Whole tiles make steps in a product's time, which one number does not follow."""
    shapes = list(_between())
    slower: list[float] = []
    for kind in CHOSEN["cuda"]:
        numerics = _numerics(kind, "auto", device)
        for shape in shapes:
            if takes_gram(*shape, numerics):
                ratio = max(_gram_by_standard(device, kind, *shape))
                slower += [ratio] * (ratio > SLOWER)
    assert len(slower) <= 0.02 * len(shapes) * len(CHOSEN["cuda"])
    assert max(slower, default=0.0) < 1.3


def _grid() -> Iterator[tuple[int, int]]:
    for shape in MODELS.split():
        short, long = map(int, shape.split("x"))
        yield short, long
    for short in range(6, 15):
        for long in range(short, 16):
            yield 1 << short, 1 << long


def _between() -> Iterator[tuple[int, int]]:
    for short in map(int, SHORT.split()):
        for aspect in ASPECTS:
            yield short, int(short * aspect)


@pytest.mark.parametrize(
    "shape, device, gram",
    [
        ((512, 2048), "cuda", False),
        ((4096, 14336), "cuda", True),
        ((1536, 2048), "cuda_triton", True),
        ((2048, 4096), "cuda_triton", True),
        ((7168, 4096), "cuda_triton", True),
        ((6144, 4096), "cuda_triton", True),
        ((768, 2048), "cuda_triton", True),
        ((1402, 2000), "cuda_triton", False),  # rows that the kernel does not take
        ((256, 4096), "cuda_triton", False),  # one tile
        ((768, 2048), "cuda_symmetric", False),  # rows of which torch makes more
        ((8192, 28672), "cuda_symmetric", True),
    ],
)
def test_shapes_of_models_take(
    shape: tuple[int, int], device: Device, gram: bool
) -> None:
    assert takes_gram(*shape, _numerics("simple 5 bf16", "auto", device)) == gram


def test_a_kernel_takes_aligned_rows_from_where_it_is_faster() -> None:
    assert not fits_kernel(257, 8, "cuda_triton")
    assert fits_kernel(264, 8, "cuda_triton")
    assert not fits_kernel(256, 8, "cuda_triton")
    assert fits_kernel(6144, 8, "cuda_symmetric")
    assert not fits_kernel(6136, 8, "cuda_symmetric")
    assert not fits_kernel(8192, 8, "cuda")
