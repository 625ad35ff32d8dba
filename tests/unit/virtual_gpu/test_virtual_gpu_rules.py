"""The virtual GPU's allocator, host and messages, each by a small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.virtual_gpu.memory import Way, peak
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.stage import check_stage
from support.virtual_gpu.step import record

Program = Callable[[Any, Any], None]
N = 1024


def alone(program: Program, rank: int = 0, size: int = 1) -> Recording:
    return record(rank, size, program)


def kinds(recording: Recording) -> set[str]:
    return {race.kind for race in recording.races}


def new(numel: int = N) -> Tensor:
    return torch.empty(numel, device="cuda")


# --- allocator ------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_used_on_another_stream_is_kept_by_record_stream(recorded: bool) -> None:
    def program(gpu: Any, group: Any) -> None:
        x = new()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.sum()
        if recorded:
            x.record_stream(side)

    alone(
        program
        # what a first recording imports keeps the frames of its import, and their
        # tensors
    )
    assert kinds(alone(program)) == (set() if recorded else {"freed"})


@pytest.mark.parametrize("is_foreign", [False, True])
def test_torch_keeps_a_message_in_its_own_memory_until_the_gpu_is_done(
    is_foreign: bool,
) -> None:
    def program(gpu: Any, group: Any) -> None:
        sent = new()
        received = new()
        views = [
            torch.utils.dlpack.from_dlpack(x) if is_foreign else x
            for x in (sent, received)
        ]
        kinds = (dist.isend, dist.irecv)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(kind, x[:8], 1, group)
                for kind, x in zip(kinds, views, strict=True)
            ]
        )
        works[0].wait()
        del sent, received, views
        new().zero_()

    recording = alone(program, 0, 2)
    blocks = [peak(recording.trace, way).over_state // (4 * N) for way in get_args(Way)]
    assert blocks == [2, 2 if is_foreign else 3, 3]


# --- host -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, call",
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
        # the host waits for none of these
        ("", lambda x: x.to("cpu", non_blocking=True)),
        ("", lambda x: x.copy_(torch.empty(N).pin_memory(), non_blocking=True)),
        ("", lambda x: torch.empty(N).pin_memory().copy_(x, non_blocking=True)),
        ("", lambda x: torch.full((3,), 2.0, device="cuda")),
        # a number of the host's goes to the kernel
        ("", lambda x: x.mul_(torch.tensor(2.0))),
        ("", lambda x: x.to("cuda").float()),
        ("", lambda x: torch.cuda.Event().record()),
    ],
)
def test_a_host_synchronisation_has_its_name(
    name: str, call: Callable[[Any], Any]
) -> None:
    assert [s.name for s in alone(lambda gpu, group: call(new())).host_syncs] == [
        name
    ] * bool(name)


# --- launches -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, call",
    [
        (
            0,
            lambda x, m: (
                x[1:3],
                x.view(2, -1),
                m.mT,
                x.split(100),
                torch.empty_like(x),
            ),
        ),
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
        # other strides: one each
        (2, lambda x, m: torch._foreach_copy_([m, m], [m.mT, m.mT])),
        (3, lambda x, m: torch._foreach_norm([x] * 10)),
    ],
)
def test_an_operation_launches_what_cuda_would(
    count: int, call: Callable[[Any, Any], Any]
) -> None:
    def program(gpu: Any, group: Any) -> None:
        x = new()
        m = torch.empty(16, 16, device="cuda")
        call(x, m)

    recording = alone(program)
    casts = recording.launches_by("name")["_to_copy"]
    assert recording.launches - casts == count


# --- point to point -------------------------------------------------------------------


def world(*programs: Program) -> dict[int, Recording]:
    return {
        rank: record(rank, len(programs), program)
        for rank, program in enumerate(programs)
    }


def batch(*operations: tuple[str, int, int]) -> Program:
    """(send or recv, peer, elements) in one batch that is waited for."""

    def program(gpu: Any, group: Any) -> None:
        tensors = [new(numel) for _, _, numel in operations]
        p2p = [
            dist.P2POp(
                dist.isend if kind == "send" else dist.irecv, tensor, peer, group
            )
            for (kind, peer, _), tensor in zip(operations, tensors, strict=True)
        ]
        works = dist.batch_isend_irecv(p2p)
        assert len(works) == 1
        for work in works:
            work.wait()

    return program


@pytest.mark.parametrize(
    "other, said",
    [
        (batch(("recv", 0, 6)), "0 sends 1 20 B"),
        (lambda gpu, group: None, "1 takes nothing"),
    ],
    ids=["size", "missing"],
)
def test_messages_that_do_not_fit_are_found(other: Program, said: str) -> None:
    faults = check_stage(world(batch(("send", 1, 5)), other))
    assert any(said in fault for fault in faults), faults


def test_batches_in_a_circle_are_a_deadlock() -> None:
    """Each rank sends first and receives after: in one batch it is fine, in two nobody
    moves.
    """

    def apart(rank: int) -> Program:
        two = [batch((kind, 1 - rank, 5)) for kind in ("send", "recv")]
        return lambda gpu, group: [one(gpu, group) for one in two] and None

    together = [batch(("send", 1 - r, 5), ("recv", 1 - r, 5)) for r in range(2)]
    assert check_stage(world(*together)) == []
    faults = check_stage(world(*map(apart, range(2))))
    assert any("deadlock: rank 0 waits in send" in fault for fault in faults), faults
