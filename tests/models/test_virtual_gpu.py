"""The real step on a GPU that is not there: nothing races, and each way to break it is
found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

import megatron_muon.rules.muon
from megatron_muon import MuonConfig
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.table import round_tables
from megatron_muon.runtime.exchange.messages import RoundExchange
from megatron_muon.runtime.nonfinite import Nonfinite
from megatron_muon.settings.update import NsIteration, SymmetricProducts
from support.small_squares import rows_of_small_squares
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.nccl import Handle, Operation
from support.virtual_gpu.device.tensors import CUDA
from support.virtual_gpu.messages import compare_with_plan, planned_messages
from support.virtual_gpu.mutants import Launch, of_launches
from support.virtual_gpu.plans import small_plan
from support.virtual_gpu.races import MEMORY, Memory, races
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.stage import check_stage
from support.virtual_gpu.step import record, record_step
from support.virtual_gpu.trace import StepStart

SIZES = {"one round": 1 << 30, "some": 60_000, "a round each": 1}  # a fc1 has 160 kB
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "ns_batch": {"ns_batch": 4},
    "fp32": {"ns_dtype": "fp32"},
    "gram": {"ns_iteration": "gram"},
    "foreach": {"elementwise": "foreach"},
    "foreach in fp32": {"elementwise": "foreach", "ns_dtype": "fp32"},
    "hyperball": {"rule": "hyperball"},
    "own": {"rule": "support.runs.own_rules:polar_express"},
    "normuon": {"rule": "normuon"},
    "namo": {"rule": "namo"},
    "normuon in 3 strips": {"rule": "normuon", "split_matrices": 3},
    "by pattern": {"by_pattern": ("1.*:momentum=0.9", "*fc1:ns_steps=8")},
    "in 3 strips": {"split_matrices": 3},  # of TP 2: wide matrices come as rows
    "rows of squares": {"split_matrices": 4, "ns_iteration": "gram"},
}


def squares_of(settings: str) -> AbstractContextManager[None]:
    return rows_of_small_squares() if settings == "rows of squares" else nullcontext()


def plan_of(config: MuonConfig) -> ExchangePlan:
    """Of three layers; of one where homes share matrices, since those take many
    launches.
    """
    return small_plan(config, layers=3 if config.split_matrices is None else 1)


@cache
def recorded(size: str, settings: str) -> dict[int, Recording]:
    """Two steps on every rank of TP 2 x DP 4."""
    config = MuonConfig(round_bytes=SIZES[size], **SETTINGS[settings])
    with squares_of(settings):
        plan = plan_of(config)
        return {
            rank: record_step(plan, rank, config, steps=2) for rank in range(plan.size)
        }


# Other settings change what is computed in a round, and not which rounds travel beside
# it.
IN_ALL_SIZES = ("default", "in 3 strips", "rows of squares")
STEPS = [
    (size, name)
    for name in SETTINGS
    for size in SIZES
    if size == "some" or name in IN_ALL_SIZES
]


@pytest.mark.parametrize("size, settings", STEPS)
@pytest.mark.parametrize("memory", MEMORY)
def test_nothing_races(size: str, settings: str, memory: Memory) -> None:
    for recording in recorded(size, settings).values():
        assert races(recording.trace, memory) == []


@pytest.mark.parametrize("settings", ["in 3 strips", "rows of squares"])
def test_messages_between_homes_are_the_plans(settings: str) -> None:
    """Squares, their rows, numbers, and a wide matrix that is exchanged and
    back.
    """
    config = MuonConfig(round_bytes=SIZES["some"], **SETTINGS[settings])
    with squares_of(settings):
        plan = plan_of(config)
        planned = planned_messages([plan], config)
    assert {bool(one.row_itemsize) for one in plan.shared} == {True, False}
    assert any(any(one.gathers) for one in plan.shared) == (
        settings == "rows of squares"
    )
    for rank, recording in recorded("some", settings).items():
        assert compare_with_plan(rank, recording.collectives, planned) == []


@pytest.mark.parametrize("size, settings", STEPS)
def test_ranks_agree_and_the_host_never_waits(size: str, settings: str) -> None:
    recordings = recorded(size, settings)
    assert check_stage(recordings) == []
    assert [r.host_syncs for r in recordings.values()] == [[]] * len(recordings)
    assert sum(len(r.collectives) for r in recordings.values()) > 0


# --- mutants: the exchange's calls of torch.distributed, broken on the way ------------

Mutant = Callable[[pytest.MonkeyPatch], None]


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """The exchange goes on without waiting for its messages."""
    patch.setattr(Handle, "wait", lambda self, timeout=None: True)


@of_launches
def dropped_message(launch: Launch, parts: list[Operation]) -> Handle | None:
    """What is sent is a copy that no one keeps until it has gone."""
    copies = [dataclasses.replace(p, reads=[x.clone() for x in p.reads]) for p in parts]
    return launch(copies)


@of_launches
def overwritten_message(launch: Launch, parts: list[Operation]) -> Handle | None:
    """What is sent is written to before it has gone."""
    work = launch(parts)
    for part in parts:
        for sent in part.reads:
            sent.zero_()
    return work


@of_launches
def launched_on_a_wrong_stream(launch: Launch, parts: list[Operation]) -> Handle | None:
    """NCCL waits for another stream than the one that made the message."""
    with torch.cuda.Stream():
        return launch(parts)


def newton_schulz_on_a_wrong_stream(patch: pytest.MonkeyPatch) -> None:
    original = megatron_muon.rules.muon.orthogonalize_staged

    def on_another(*args: Any, **shape: int) -> None:
        with torch.cuda.Stream():
            original(*args, **shape)

    patch.setattr(megatron_muon.rules.muon, "orthogonalize_staged", on_another)


@pytest.mark.parametrize(
    "mutant, kind, memories",
    [
        (no_wait, "unordered", MEMORY),
        (dropped_message, "freed", ("caller",)),
        (overwritten_message, "unordered", MEMORY),
        (launched_on_a_wrong_stream, "unordered", MEMORY),
        (newton_schulz_on_a_wrong_stream, "unordered", MEMORY),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_races(
    mutant: Mutant,
    kind: str,
    memories: tuple[Memory, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that torch itself keeps is safe with most releases, and only then."""
    config = MuonConfig(round_bytes=SIZES["some"])
    plan = small_plan(config)
    mutant(monkeypatch)
    trace = record_step(plan, 0, config, steps=2).trace
    kinds = {memory: {race.kind for race in races(trace, memory)} for memory in MEMORY}
    assert {memory for memory in MEMORY if kind in kinds[memory]} == set(memories)


# --- counts ---------------------------------------------------------------------------


def test_the_first_and_the_second_step_count_alike_but_for_tables() -> None:
    """On a GPU that gives a message the same memory in each step, tables of addresses
    stay, too.
    """
    config = MuonConfig(round_bytes=SIZES["some"], elementwise="foreach")
    plan = small_plan(config)
    one = record_step(plan, 0, config)
    two = recorded("some", "foreach")[0]
    assert (one.launches, one.peak.over_state) == (two.launches, two.peak.over_state)
    assert len(one.collectives) == len(two.collectives)
    fused = recorded("some", "default")[0]
    config = MuonConfig(round_bytes=SIZES["some"])
    with_runs = sum(
        bool(table.matrices) for table in round_tables(plan.for_rank(0), plan.matrices)
    )
    first = record_step(plan, 0, config)
    copies = [r.launches_by("name")["copy from host"] for r in (first, fused)]
    assert copies == [5 * with_runs, 2 * with_runs]  # blocks, addresses; and factors
    assert first.launches - fused.launches == copies[0] - copies[1]


@pytest.mark.parametrize(
    "size, settings", [*((size, "default") for size in SIZES), ("some", "fp32")]
)
def test_a_round_has_one_launch_for_its_momentum_and_one_for_its_update(
    size: str, settings: str
) -> None:
    for rank, recording in recorded(size, settings).items():
        plan = small_plan(MuonConfig(round_bytes=SIZES[size], **SETTINGS[settings]))
        with_runs = sum(
            bool(table.matrices)
            for table in round_tables(plan.for_rank(rank), plan.matrices)
        )
        names = recording.launches_by("name")
        assert names["advance_momentum"] == names["apply_updates"] == with_runs > 0
        assert not any(name.startswith("_foreach_mul") for name in names)
        assert "_foreach_norm" not in names


def _orthogonalized(by: SymmetricProducts, iteration: NsIteration) -> Recording:
    """Three matrices of 512 × 1024 in a batch, on a GPU."""
    config = MuonConfig(symmetric_products=by, ns_iteration=iteration)
    numerics = Numerics(config, "cuda" if by == "torch" else "cuda_triton")

    def program(gpu: Gpu, group: Any) -> None:
        staged = torch.zeros(3 << 19, dtype=torch.bfloat16, device=CUDA)
        moves = torch.ones(3, dtype=torch.bool, device=CUDA)
        gpu.trace.events.append(StepStart())
        orthogonalize_staged(staged, moves, numerics, rows=512, cols=1024)

    return record(0, 1, program)


def _products(recording: Recording) -> int:
    names = recording.launches_by("name")
    copies = names["baddbmm"] // 2  # of the linear term, a launch before
    return names["bmm"] + names["baddbmm"] - copies


@pytest.mark.parametrize("iteration, squares", [("standard", 10), ("gram", 12)])
def test_a_kernel_for_symmetric_products_replaces_torchs_without_more_memory(
    iteration: NsIteration, squares: int
) -> None:
    torchs = _orthogonalized("torch", iteration)
    tritons = _orthogonalized("triton", iteration)
    assert tritons.launches_by("name")["symmetric"] == squares
    assert _products(tritons) == _products(torchs) - squares
    assert tritons.launches <= torchs.launches
    assert tritons.peak_bytes <= torchs.peak_bytes
    assert tritons.host_syncs == torchs.host_syncs == []
    assert all(races(tritons.trace, memory) == [] for memory in MEMORY)


@pytest.mark.parametrize("size", SIZES)
def test_what_tells_whether_directions_are_finite_is_launched_by_round(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six operations mark a round's directions, whatever their number, and each batch
    has its line.

    A step ends with three that count, and a copy that the host does not wait for.
    """
    config = MuonConfig(round_bytes=SIZES[size])
    plan = small_plan(config)
    before = recorded(size, "default")[0]
    homes = sum(bool(t.homes) for t in round_tables(plan.for_rank(0), plan.matrices))
    monkeypatch.setattr(RoundExchange, "mark", lambda *_: None)
    monkeypatch.setattr(Nonfinite, "add", lambda *_: None)
    without = record_step(plan, 0, config, steps=2)
    assert before.launches - without.launches == 4 * homes + 4
    assert (before.host_syncs, before.peak_bytes) == ([], without.peak_bytes)
    names = before.launches_by("name")
    # of a batch that is divided once: its largest entries, norms, and a line's largest
    assert names["linalg_vector_norm"] == 3 * names["div"]
