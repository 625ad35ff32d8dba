"""The device's results against a CPU's: equal bits where operations round once, else a
bound.
"""

from __future__ import annotations

import pytest
import torch

from megatron_muon.lab.accept.results import Figure
from support.gpu import bits
from support.gpu.model import on_ranks
from support.gpu.settings import Check, Report, Settings
from support.virtual_gpu.step import virtual_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
# Errors of the same iteration on two devices differ by the order of sums, and in fp16
# by linear terms that a GPU folds (``Numerics.folded``): the largest factors seen are
# 3, and 8 on an H200.
FACTOR, FOLDED = 3.0, 16.0


@pytest.fixture(scope="module")
def found(settings: Settings) -> bits.Bits:
    one = Settings(settings.device, 1)
    (rank,) = on_ranks(one, bits.run, settings.device, 110.0)
    assert isinstance(rank, bits.Bits)
    return rank


@pytest.mark.parametrize("way", ["foreach", "fused kernels"])
def test_momentum_norm_and_update_have_a_cpus_bits(
    way: str,
    found: bits.Bits,
    needs_gpu: Check,
    report: Report,
) -> None:
    ways = {each.way: each.differ for each in found.elementwise}
    if not ways:  # the same code, without its values
        with virtual_gpu():
            assert way in {each.way for each in bits.elementwise(torch.device("cuda"))}
    needs_gpu()
    if way not in ways:
        pytest.skip("triton is not installed")
    report(text="after two steps")
    assert ways[way] == ()


@pytest.mark.parametrize("name", [bits.name_of(config) for config in bits.configs()])
def test_its_error_to_float64_is_bounded(
    name: str, found: bits.Bits, report: Report
) -> None:
    errors = [error for error in found.errors if error.name.startswith(f"{name}, ")]
    if not errors:
        pytest.skip("triton's products need a GPU, and triton")
    report(
        *(
            Figure(
                f"{error.name}: error to float64", "", error.there, error.here, 0.0,
                FOLDED if "fp16" in name else FACTOR,
                corrects="The error that a CPU makes was taken as the prediction.",
            )
            for error in errors
        ),
        text=f"below {errors[0].bound:g}",
    )  # fmt: skip
    assert [error for error in errors if not error.here <= error.bound] == []


def test_the_same_matrix_twice_gives_the_same_bits(
    found: bits.Bits, report: Report
) -> None:
    report(text="every dtype and iteration; zero gives zeros")
    assert found.twice == ()
