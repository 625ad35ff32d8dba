"""Does a step race? Torch's CUDA sanitizer sees operations of torch, and no race of
NCCL.

Send and receive do not tell it what they write. ``tests/models`` holds those orders.
"""

from __future__ import annotations

import pytest

from support.gpu.model import on_ranks
from support.gpu.sanitizer import on_virtual_gpu, under_sanitizer
from support.gpu.settings import Check, Report, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
Found = list[tuple[str, str]]


@pytest.fixture(scope="module")
def found(settings: Settings) -> Found:
    """Of each rank, the races of two steps, and the planted race's; empty for none."""
    if settings.gpus:
        return on_ranks(settings, under_sanitizer, settings, 110.0)
    return on_virtual_gpu(settings)


def test_no_race_in_two_steps(found: Found, needs_gpu: Check, report: Report) -> None:
    assert [
        f"rank {rank}: {race}" for rank, (race, _) in enumerate(found) if race
    ] == []
    needs_gpu()
    report(
        text=(
            "operations of torch on all streams; the sanitizer cannot see races of NCCL"
        )
    )


def test_a_planted_race_is_found(
    found: Found, needs_gpu: Check, report: Report
) -> None:
    """Else the sanitizer's silence on the steps shows nothing."""
    if any(race for race, _ in found):
        pytest.skip("the steps raced first")
    assert [rank for rank, (_, planted) in enumerate(found) if not planted] == []
    needs_gpu()
    report(text="on every rank")
