"""Muon's state on the host, on a GPU that is not there: what copies touch, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from support.virtual_gpu.device import cuda, tensors
from support.virtual_gpu.plans import small_plan
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.stage import check_stage
from support.virtual_gpu.step import record_step
from support.virtual_gpu.trace import MAIN, EventRecord, Kernel, StreamWait

WHOLE: dict[str, Any] = {
    "optimizer_offload_fraction": 1.0,
    "exp_avg_dtype": torch.float32,
}
HOSTED: dict[str, dict[str, Any] | None] = {
    "whole": WHOLE,
    "halves": {**WHOLE, "store_param_remainders": True},
    "half of it": {**WHOLE, "optimizer_offload_fraction": 0.5},
    "none": None,
}
SIZES = {"one round": 1 << 30, "some": 60_000, "a round each": 1}


def record(size: str, hosted: str, tp: int = 2) -> dict[int, Recording]:
    """Three steps on every rank of TP 2 x DP 4, or of one."""
    config = MuonConfig(round_bytes=SIZES[size])
    plan = small_plan(config, tp=tp, dp=4 if tp > 1 else 1)
    ranks = range(plan.size)
    return {
        r: record_step(plan, r, config, steps=3, hosted=HOSTED[hosted]) for r in ranks
    }


recorded = cache(record)


def _on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep in the device's memory what would be on the host: copies of both sides are
    seen then.
    """
    monkeypatch.setattr(
        cuda,
        "pinned",
        lambda tensor: torch.zeros(
            tensor.shape, dtype=tensor.dtype, device=tensors.CUDA
        ),
    )


@pytest.mark.parametrize("hosted", ["whole", "halves", "half of it"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_races_and_the_host_never_waits(
    size: str, hosted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tp in (1, 2):
        recordings = recorded(size, hosted, tp)
        assert check_stage(recordings) == []
        for recording in recordings.values():
            assert recording.host_syncs == [] and recording.races == []
    with monkeypatch.context() as patch:
        _on_the_device(patch)
        assert [r.races for r in record(size, hosted).values()] == [[]] * 8


def no_wait_for_a_copy(stream: type, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream, "wait_event", lambda *_: None)


def no_copy_waits(stream: type, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream, "wait_stream", lambda *_: None)


@pytest.mark.parametrize("mutant", [no_wait_for_a_copy, no_copy_waits])
def test_a_mutant_races(
    mutant: Callable[[type, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(cuda.Stream, monkeypatch)
    assert {race.kind for race in record("some", "whole")[0].races} >= {"unordered"}


@pytest.mark.parametrize("hosted, nbytes", [("whole", 8), ("halves", 6)])
@pytest.mark.parametrize("tp", [1, 2])
def test_each_element_comes_and_goes_once_while_matrices_are_orthogonalized(
    hosted: str, nbytes: int, tp: int
) -> None:
    """One rank has all matrices: each tensor but the first is on its way during
    products.
    """
    config = MuonConfig(round_bytes=1)
    plan = small_plan(config, tp=tp, dp=4 if tp > 1 else 1)
    for rank, recording in recorded("a round each", hosted, tp).items():
        elements = sum(span.size for span in plan.for_rank(rank).shards.values())
        for name in ("copy from host", "copy to host"):
            assert _bytes(recording, name) == nbytes * elements
        early = _on_the_way(recording)
        assert tp > 1 or (not early[0] and all(early[1:]))


def _bytes(recording: Recording, name: str) -> int:
    """Of copies beside the stream that computes; on it are tables of kernels."""
    copies = [e for e in recording.step if isinstance(e, Kernel) and e.name == name]
    beside = [copy for copy in copies if copy.stream != MAIN]
    return sum(stop - start for c in beside for _, start, stop in (*c.reads, *c.writes))


def _on_the_way(recording: Recording) -> list[bool]:
    """For each tensor that comes, whether products are launched before the GPU waits
    for it.
    """
    found, coming, products = [], dict[int, int](), 0
    copied = False
    for event in recording.step:
        if isinstance(event, Kernel):
            products += event.phase == "muon/newton_schulz"
            copied = event.name == "copy from host" and event.stream != MAIN
        elif isinstance(event, EventRecord) and copied:
            coming[event.event], copied = products, False
        elif isinstance(event, StreamWait) and event.event in coming:
            found.append(coming.pop(event.event) < products)
    return found


def test_four_rounds_of_state_are_on_the_device_at_most() -> None:
    config = MuonConfig(round_bytes=1)
    plan = small_plan(config)
    plain, hosted = (recorded("a round each", each) for each in ("none", "whole"))
    for rank, recording in hosted.items():
        largest = max(span.size for span in plan.for_rank(rank).shards.values())
        assert recording.peak_bytes - plain[rank].peak_bytes <= 4 * 4 * largest
