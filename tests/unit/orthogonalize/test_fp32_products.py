"""fp32 products are made in fp32, whatever the process allows elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_muon.orthogonalize.matmul import sums_in_fp32

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.mkldnn, "matmul"),
    reason="torch before 2.9 has the old option only",
)
CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def _options() -> dict[str, object]:
    """torch's options of fp32 products; ``raises`` where old and new ones say different
    things.
    """
    read: dict[str, Callable[[], object]] = {
        "old": torch.get_float32_matmul_precision,
        "cuda": lambda: CUDA.fp32_precision,
        "allow_tf32": lambda: CUDA.allow_tf32,
        "cpu": lambda: CPU.fp32_precision,
    }
    values: dict[str, object] = {}
    for name, one in read.items():
        try:
            values[name] = one()
        except RuntimeError:
            values[name] = "raises"
    return values


def _allow_tf32() -> None:
    CUDA.allow_tf32 = True


def _new_option() -> None:
    CUDA.fp32_precision = "tf32"


def _options_that_disagree() -> None:
    torch.set_float32_matmul_precision("medium")
    CUDA.fp32_precision = "ieee"


def _old_options_that_disagree() -> None:
    torch.set_float32_matmul_precision("medium")
    CUDA.allow_tf32 = True


def _new_option_of_the_cpu() -> None:
    CPU.fp32_precision = "bf16"


@pytest.fixture(autouse=True)
def _as_at_first() -> Iterator[None]:
    before = CUDA.fp32_precision, CPU.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    CUDA.fp32_precision, CPU.fp32_precision = before


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "setter",
    [
        lambda: None,
        # as the environment's override does
        lambda: torch.set_float32_matmul_precision("high"),
        _allow_tf32,
        _new_option,
        _options_that_disagree,
        _old_options_that_disagree,
        _new_option_of_the_cpu,
    ],
    ids=["nothing", "old", "allow_tf32", "new", "both", "two old ones", "the CPU's"],
)
def test_every_option_means_fp32_inside_and_is_restored_afterwards(
    setter: Callable[[], None], device: str
) -> None:
    """Some products of CUDA ask ``allow_tf32``, which raises where old and new options
    differ.
    """
    setter()
    before = _options()
    with sums_in_fp32(torch.device(device)):
        inside = _options()
    assert _options() == before
    assert inside[device] == "ieee"
    assert (inside["old"], inside["allow_tf32"]) == ("highest", False)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    reason="torch before 2.7",
)
def test_products_in_fp16_are_not_accumulated_in_fp16() -> None:
    """Sums of a square of norm 128 would lose eleven of fp32's bits."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_accumulation = True
    try:
        with sums_in_fp32(torch.device("cuda")):
            assert not matmul.allow_fp16_accumulation
        assert matmul.allow_fp16_accumulation
    finally:
        matmul.allow_fp16_accumulation = False
