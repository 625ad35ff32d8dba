"""The virtual GPU's streams, allocator, host and messages, each by a small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from support.virtual_gpu.memory import Way
from support.virtual_gpu.races import MEMORY, races
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.stage import check_stage
from support.virtual_gpu.step import record

Program = Callable[[Any, Any], None]
N = 1024


def alone(program: Program, rank: int = 0, size: int = 1) -> Recording:
    return record(rank, size, program)


def kinds(recording: Recording) -> set[str]:
    return {race.kind for race in recording.races}


def new(numel: int = N) -> torch.Tensor:
    return torch.empty(numel, device="cuda")


# --- order ---------------------------------------------------------------------------------------


def _on_two_streams(order: Callable[[Any, Any], None]) -> Program:
    def program(gpu: Any, group: Any) -> None:
        x, side = new(), torch.cuda.Stream()
        x.zero_()
        order(side, torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        del y

    return program


def _by_event(side: Any, main: Any) -> None:
    event = torch.cuda.Event()
    event.record()
    event.wait(side)


def _by_late_event(side: Any, main: Any) -> None:
    """Recorded on the stream that waits: it orders nothing."""
    event = torch.cuda.Event()
    event.record(side)
    side.wait_event(event)


@pytest.mark.parametrize(
    ("order", "raced"),
    [
        (lambda side, main: side.wait_stream(main), False),
        (_by_event, False),
        (lambda side, main: torch.cuda.synchronize(), False),
        (lambda side, main: main.synchronize(), False),
        (lambda side, main: None, True),
        (lambda side, main: side.synchronize(), True),
        (_by_late_event, True),
    ],
    ids=["wait_stream", "event", "synchronize", "main", "nothing", "side", "late event"],
)
def test_streams_are_ordered_by_what_orders_them(
    order: Callable[[Any, Any], None], raced: bool
) -> None:
    assert ("unordered" in kinds(alone(_on_two_streams(order)))) is raced


# --- allocator -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_used_on_another_stream_is_kept_by_record_stream(recorded: bool) -> None:
    def program(gpu: Any, group: Any) -> None:
        x, side = new(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if recorded:
            x.record_stream(side)

    assert kinds(alone(program)) == (set() if recorded else {"freed"})


def test_memory_of_a_collective_is_kept_as_the_torch_release_does() -> None:
    def program(gpu: Any, group: Any) -> None:
        work = dist.all_reduce(new(), async_op=True)
        assert work is not None
        work.wait()

    trace = alone(program, 0, 2).trace
    assert {memory for memory in MEMORY if races(trace, memory)} == {"caller"}


@pytest.mark.parametrize("is_foreign", [False, True])
def test_torch_keeps_a_message_in_its_own_memory_until_the_gpu_is_done(is_foreign: bool) -> None:
    def program(gpu: Any, group: Any) -> None:
        sent, received = new(), new()
        views = [torch.utils.dlpack.from_dlpack(x) if is_foreign else x for x in (sent, received)]
        kinds = (dist.isend, dist.irecv)
        works = dist.batch_isend_irecv(
            [dist.P2POp(kind, x[:8], 1, group) for kind, x in zip(kinds, views, strict=True)]
        )
        works[0].wait()
        del sent, received, views
        new().zero_()

    recording = alone(program, 0, 2)
    blocks = [recording.peak_bytes_if(way) // (4 * N) for way in get_args(Way)]
    assert blocks == [2, 2 if is_foreign else 3, 3]


# --- host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("item", lambda x: x[0].item()),
        ("tolist", lambda x: x.tolist()),
        ("bool", lambda x: bool(x[0] > 0)),
        ("float", lambda x: float(x[0])),
        ("int", lambda x: int(x[0])),
        ("cpu", lambda x: x.cpu()),
        ("copy to host", lambda x: torch.empty(N).copy_(x, non_blocking=True)),
        ("copy from host", lambda x: x.copy_(torch.empty(N))),
        ("copy from host", lambda x: x.copy_(torch.empty(N), non_blocking=True)),
        ("torch.tensor", lambda x: torch.tensor(1.0, device="cuda")),
        ("equal", lambda x: torch.equal(x, x)),
        ("torch.cuda.synchronize", lambda x: torch.cuda.synchronize()),
        ("Stream.synchronize", lambda x: torch.cuda.current_stream().synchronize()),
        ("barrier", lambda x: dist.barrier()),
    ],
)
def test_a_host_synchronisation_has_its_name(name: str, call: Callable[[Any], Any]) -> None:
    assert [s.name for s in alone(lambda gpu, group: call(new())).host_syncs] == [name]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.copy_(torch.empty(N).pin_memory(), non_blocking=True),
        lambda x: torch.empty(N).pin_memory().copy_(x, non_blocking=True),
        lambda x: torch.full((3,), 2.0, device="cuda"),
        lambda x: x.mul_(torch.tensor(2.0)),  # a number of the host's is an argument of the kernel
        lambda x: x.to("cuda").float(),
        lambda x: torch.cuda.Event().record(),
    ],
    ids=["to host", "pinned up", "pinned down", "full", "host scalar", "nothing to move", "event"],
)
def test_the_host_does_not_wait(call: Callable[[Any], Any]) -> None:
    assert alone(lambda gpu, group: call(new())).host_syncs == []


# --- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "call"),
    [
        (0, lambda x, m: (x[1:3], x.view(2, -1), m.mT, x.split(100), torch.empty_like(x))),
        (1, lambda x, m: x.mul_(2)),
        (1, lambda x, m: m @ m),
        (2, lambda x, m: torch.addmm(m, m, m)),  # the term is copied first
        (1, lambda x, m: torch.addmm(m, m, m, beta=0, out=m.new_empty(16, 16))),
        (1, lambda x, m: torch.cat([x] * 128)),
        (2, lambda x, m: torch.cat([x] * 129)),
        (0, lambda x, m: x[:0].add_(1)),
        (1, lambda x, m: torch._foreach_mul_([x] * 110, 2.0)),
        (2, lambda x, m: torch._foreach_mul_([x] * 111, 2.0)),
        (2, lambda x, m: torch._foreach_add_([x] * 65, [x] * 65)),
        (1, lambda x, m: torch._foreach_copy_([x] * 9, [x.bfloat16()] * 9) and None),
        (2, lambda x, m: torch._foreach_copy_([m, m], [m.mT, m.mT])),  # other strides: one each
        (3, lambda x, m: torch._foreach_norm([x] * 10)),
    ],
)
def test_an_operation_launches_what_cuda_would(count: int, call: Callable[[Any, Any], Any]) -> None:
    def program(gpu: Any, group: Any) -> None:
        x, m = new(), torch.empty(16, 16, device="cuda")
        before.append(len(gpu.trace.events))
        call(x, m)

    before: list[int] = []
    recording = alone(program)
    casts = recording.launches_by_name["_to_copy"]
    assert recording.launches - casts == count


# --- point to point ------------------------------------------------------------------------------


def world(*programs: Program) -> dict[int, Recording]:
    return {rank: record(rank, len(programs), program) for rank, program in enumerate(programs)}


def batch(*operations: tuple[str, int, int]) -> Program:
    """(send or recv, peer, elements) in one batch that is waited for."""

    def program(gpu: Any, group: Any) -> None:
        tensors = [new(numel) for _, _, numel in operations]
        p2p = [
            dist.P2POp(dist.isend if kind == "send" else dist.irecv, tensor, peer, group)
            for (kind, peer, _), tensor in zip(operations, tensors, strict=True)
        ]
        works = dist.batch_isend_irecv(p2p)
        assert len(works) == 1
        for work in works:
            work.wait()

    return program


def then(*programs: Program) -> Program:
    def program(gpu: Any, group: Any) -> None:
        for one in programs:
            one(gpu, group)

    return program


def single(kind: str, peer: int, numel: int = N) -> Program:
    def program(gpu: Any, group: Any) -> None:
        tensor = new(numel)
        (dist.send if kind == "send" else dist.recv)(tensor, peer)

    return program


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((batch(("send", 1, 5)), batch(("recv", 0, 6))), "0 sends 1 20 B"),
        ((batch(("send", 1, 5)), lambda gpu, group: None), "1 takes nothing"),
        (
            (batch(("send", 1, 5), ("send", 1, 6)), batch(("recv", 0, 6), ("recv", 0, 5))),
            "0 sends 1 20 B of torch.float32, 24 B",
        ),
        # single messages have a communicator of their own
        ((batch(("send", 1, 5)), single("recv", 0, 5)), "1 takes nothing"),
        ((then(single("send", 1)), then(single("recv", 0), single("recv", 0))), "1 takes 4096 B"),
    ],
    ids=["size", "missing", "order", "single", "number"],
)
def test_messages_that_do_not_fit_are_found(ranks: tuple[Program, ...], said: str) -> None:
    faults = check_stage(world(*ranks))
    assert any(said in fault for fault in faults), faults


def test_batches_in_a_circle_are_a_deadlock() -> None:
    """Each rank sends first and receives after: in one batch it is fine, in two nobody moves."""
    together = [batch(("send", 1 - r, 5), ("recv", 1 - r, 5)) for r in range(2)]
    apart = [then(batch(("send", 1 - r, 5)), batch(("recv", 1 - r, 5))) for r in range(2)]
    assert check_stage(world(*together)) == []
    assert any("deadlock: rank 0 waits in send" in fault for fault in check_stage(world(*apart)))


def test_a_coalesced_group_is_one_launch() -> None:
    def program(gpu: Any, group: Any) -> None:
        shards = [new(), new()]
        with dist._coalescing_manager(group, async_ops=True) as manager:
            for shard in shards:
                dist.reduce_scatter_tensor(shard, new(2 * N), group=group, async_op=True)
        manager.wait()
        shards[1].add_(1)

    recordings = world(program, program)
    assert [len(r.collectives) for r in recordings.values()] == [1, 1]
    assert check_stage(recordings) == []
    assert {race.kind for r in recordings.values() for race in r.races} == {"freed"}  # the inputs
