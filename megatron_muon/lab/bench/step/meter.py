"""Measuring a step from outside: time by part, bytes sent, flops, peak memory.

Every optimizer is measured in the same way, none by a meter of its own.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

PARAM_GATHER = "params-all-gather"
# The kind of bytes that a part of the step sends. Bytes outside these parts are "norm":
# a few bytes for the gradient norm and the votes of all ranks.
KINDS = {
    "muon-gather": "gather",
    "muon-scatter": "scatter",
    "muon-tp_gather": "tp_gather",
    PARAM_GATHER: "param_gather",
    "grad-reduce": "grad_reduce",
}
EXCHANGE = ("muon-gather", "muon-scatter", "muon-tp_gather")
NEWTON_SCHULZ = "muon-newton_schulz"


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one step on one rank.

    ``parts_ms`` is by part, without the parts inside it; ``rest`` is outside all parts.
    ``ns_cpu_ms`` is processor time of this thread in Newton-Schulz; meaningless on a
    GPU.
    """

    ms: float
    parts_ms: dict[str, float]
    ns_cpu_ms: float


class StepTimers:
    """Stands in for Megatron's ``Timers``: optimizers call ``watch(name).start()`` and
    ``.stop()``.

    On a GPU begins and ends are CUDA events of the current stream, which are read after
    the step. Nothing waits for them, and a part's time is the time of its kernels on
    that stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, bool, Any, float]] = []
        self._inside: list[str] = []

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    @property
    def inside(self) -> str | None:
        """The innermost part that has begun and not ended."""
        return self._inside[-1] if self._inside else None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context that is measured as a part of the step, named ``name``."""
        self.mark(name, begins=True)
        try:
            yield
        finally:
            self.mark(name, begins=False)

    def time(self, owner: Any, method: str, part: str) -> None:
        """Time each call of a method of ``owner`` from now on as a part of the step."""
        setattr(owner, method, self.timed(getattr(owner, method), part))

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, each call of which is a part of the step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return call

    def mark(self, name: str, *, begins: bool) -> None:
        if begins:
            self._inside.append(name)
        else:
            innermost = self._inside.pop()
            assert innermost == name, f"{name} ends inside {innermost}"
        self._marks.append((name, begins, self._now(), time.thread_time()))

    def measure(self, step: Callable[[], None]) -> Times:
        """Run and time a step."""
        self._marks.clear()
        with self.part("rest"):
            step()
        if self._cuda:
            torch.cuda.synchronize()
        parts: dict[str, float] = defaultdict(float)
        stack: list[list[Any]] = []  # begin, processor time then, ms of parts inside
        cpu = total = 0.0
        for name, begins, now, thread in self._marks:
            if begins:
                stack.append([now, thread, 0.0])
                continue
            begin, thread_then, within = stack.pop()
            total = self._ms(begin, now)
            parts[name] += total - within
            if stack:
                stack[-1][2] += total
            if name == NEWTON_SCHULZ:
                cpu += 1e3 * (thread - thread_then)
        return Times(total, dict(parts), cpu)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _ms(self, begin: Any, end: Any) -> float:
        return (
            float(begin.elapsed_time(end)) if self._cuda else 1e3 * float(end - begin)
        )


@dataclass(frozen=True, slots=True)
class _Timer:
    watch: StepTimers
    name: str

    def start(self, barrier: bool = False) -> None:
        self.watch.mark(self.name, begins=True)

    def stop(self, barrier: bool = False) -> None:
        self.watch.mark(self.name, begins=False)


@dataclass
class Counted:
    """Of one step on one rank: bytes sent to other ranks, by kind, and flops of
    products.
    """

    sent_bytes: dict[str, int] = field(default_factory=dict)
    flops: int = 0


def count(watch: StepTimers, step: Callable[[], None]) -> Counted:
    """Run a step and count its bytes and flops; this takes several times as long as the
    step.
    """
    wire = _Wire(watch)
    with FlopCounterMode(display=False) as flops, wire:
        step()
    sent = {kind: number for kind, number in wire.sent.items() if number}
    return Counted(sent, flops.get_total_flops())


class _Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that each collective sends from this rank to others.

    An all-to-all counts by its sizes, other collectives as by bandwidth-optimal
    algorithms, whatever the backend does.
    """

    def __init__(self, watch: StepTimers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[str, int] = defaultdict(int)
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = _sent(name, args)
            self.sent[KINDS.get(self._watch.inside or "", "norm")] += sent
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> int:
    if name in ("barrier", "monitored_barrier_", "recv_"):
        return 0
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    group: Any = dist.ProcessGroup.unbox(boxed)
    size = int(group.size())
    rank = int(group.rank())
    if name == "alltoall_base_":
        _, sent, _, _, sizes, *_ = args
        kept = sizes[rank] if sizes else sent.numel() // size
        return int((sent.numel() - kept) * sent.element_size())
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return (size - 1) * _bytes(args[1])
    if name in (
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
    ):
        return _bytes(args[1]) * (size - 1) // size
    if name in ("allreduce_", "allreduce_coalesced_"):
        return 2 * _bytes(args[0]) * (size - 1) // size
    if name == "send":
        return _bytes(args[0])
    if name == "broadcast_":
        root = args[2]
        return (size - 1) * _bytes(args[0]) if root == rank else 0
    raise NotImplementedError(f"what c10d::{name} sends is not known to the benchmark")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(_bytes(tensor) for tensor in tensors)


def peak_bytes(device: torch.device, step: Callable[[], None]) -> int:
    """Peak bytes that a step has allocated at once, on top of the bytes before it.

    On the CPU the peak follows from every allocation and release of torch's allocator,
    in order.
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    events: list[Any] = trace.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    live = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        most = max(most, live)
    return most


# The start of a name in torch's profiler, and the kind of work on a GPU.
_COPIES = {"memcpy": "copies", "memset": "memsets"}


def launched(profiler: Any) -> dict[str, int]:
    """Kernels, copies and memsets of a GPU, by the ``profiler`` of torch's
    ``profile``.
    """
    counts = {"kernels": 0, "copies": 0, "memsets": 0}
    for event in profiler.kineto_results.events():
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        counts[_COPIES.get(event.name()[:6].lower(), "kernels")] += 1
    return counts
