"""A rank's part in ``megatron-muon bench step``: in each round every row takes one
step.

Memory holds one row at a time. Before a row's step its storage is allocated and filled.
Weights and gradients get noise that is the same for every row, optimizer state zeros.
After the step the storage is freed. So every step is a first step from the same
weights. All rows of our Muon with the same iteration must end it with the same bits.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_muon import meter
from megatron_muon.lab.bench.step.build import Built, build
from megatron_muon.lab.bench.step.meter import (
    Counted,
    StepTimers,
    Times,
    count,
    launched,
    peak_bytes,
)
from megatron_muon.lab.bench.step.rows import Row
from megatron_muon.lab.progress import announce, progress
from megatron_muon.runtime import collectives

NOISE = 4_194_301  # elements; a prime, so that no two rows of a weight are the same


@dataclass(frozen=True, slots=True)
class StepJob:
    """The task of the measurement; the same for every rank."""

    flags: Namespace  # flags of the model and its ranks, see flags.parsed
    rows: tuple[Row, ...]  # rows in the order of the table
    rounds: int  # number of rounds, with one timed step of each row
    traces: Path | None = None  # for Chrome traces of a step, in a folder for each row
    # whether to count a GPU's kernels and copies, and the host's time
    launches: bool = False


@dataclass
class Measured:
    """The measurements of one row on one rank."""

    times: list[Times] = field(default_factory=list)  # times of each round's step
    # of one step, and of its gradients
    counted: Counted = field(default_factory=Counted)
    # rounds of our exchange in a step, summed over its optimizers
    exchange_rounds: int = 0
    # of the stage with each matrix once; on its first rank, else 0
    ns_flops_once: int = 0
    state_bytes: int = 0  # bytes of fp32 main parameters and optimizer state
    peak_bytes: int = 0  # peak bytes in a step, minus the bytes before it
    weights: int = 0  # checksum of the model's weights after a step
    metered_bytes: int = 0  # of the exchange by our own meter; 0 for other rows
    launched: dict[str, int] = field(default_factory=dict)  # kernels and copies
    host_ms: float = 0.0  # in which the host launches a step; 0 if not asked for


def measure(job: StepJob) -> list[Measured]:
    """Measurements of every row on this rank; torch's world is up, Megatron's groups
    are not.
    """
    device = start_megatron(job.flags)
    noise = torch.empty(NOISE, device=device)
    generator = torch.Generator(device).manual_seed(1)
    noise.normal_(0.0, 0.02, generator=generator)
    watch = StepTimers(device)
    is_first = dist.get_rank() == 0
    contenders = []
    for row in job.rows:
        if is_first:  # a large model takes minutes
            announce(f"building {row.name}")
        contender = _Contender(row, build(row, job.flags, watch), watch, noise)
        contender.park()
        contenders.append(contender)
    for row, contender in zip(job.rows, contenders, strict=True):
        if is_first:
            announce(f"counting {row.name}")
        contender.count()
        contender.weigh()
        if row.kind == "muon":
            contender.read_plan_and_meter()
        if job.launches and device.type == "cuda":
            contender.watch_launches()
        if job.traces is not None:
            contender.trace(job.traces / row.name)
    for number in progress(
        range(job.rounds), "rounds", disable=None if is_first else True
    ):
        shift = number % len(contenders)
        for contender in contenders[shift:] + contenders[:shift]:
            contender.measured.times.append(contender.step())
    return [contender.measured for contender in contenders]


def start_megatron(flags: Namespace) -> torch.device:
    """Make Megatron's process groups in torch's world; the device of this rank."""
    from megatron_muon.lab.dry_run.model import ranks_of
    from megatron_muon.lab.dry_run.world import initialize_groups

    initialize_groups(ranks_of(flags))
    return torch.device(torch.cuda.current_device())


class _Contender:
    """A row on this rank."""

    def __init__(
        self, row: Row, built: Built, watch: StepTimers, noise: Tensor
    ) -> None:
        self.measured = Measured()
        self._chunks = built.chunks
        self._optimizer = built.optimizer
        self._watch = watch
        self._noise = noise
        self._parked: list[tuple[torch.UntypedStorage, int]] = []
        # Megatron has no timers of them
        for name in ("prepare_grads", "get_grad_norm"):
            watch.time(built.optimizer, name, name.replace("_", "-"))

    def park(self) -> None:
        """Free the storage that the row only needs for its steps."""
        self._optimizer.zero_grad()
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        by_place = {storage.data_ptr(): storage for storage in storages}
        self._parked = [(storage, storage.nbytes()) for storage in by_place.values()]
        for storage, _ in self._parked:
            storage.resize_(0)
        # freed memory goes back to the system for other ranks; glibc may keep it
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """A context in which the row has its storage, filled as before a first step.

        All ranks begin it together.
        """
        with torch.no_grad():
            self._wake()
        collectives.all_gather_numbers([0], None, self._noise.device)
        yield
        self.park()

    def _wake(self) -> None:
        for storage, size in self._parked:
            storage.resize_(size)
        self._parked = []
        keys = {}
        for key, param in self._params():
            keys[param] = key
            param.data.zero_()  # each step gathers it from the main parameters
            self._fill(param.main_grad.view(-1), f"gradient of {key}", 0)
        for param, main, start in main_params(self._optimizer):
            self._fill(main.view(-1), f"weight {keys[param]}", start)
        for tensor in states(self._optimizer):
            tensor.zero_()

    def step(self) -> Times:
        """One timed step."""
        with self._awake():
            times = self._watch.measure(self._step)
            self.measured.weights = self._checksum()
        return times

    def count(self) -> None:
        """Count a step, the row's first, and the bytes of the reduction of gradients
        before it.
        """
        with self._awake():
            reduced = count(self._watch, self._reduce_gradients)
            counted = count(self._watch, self._step)
            counted.sent_bytes |= reduced.sent_bytes
            self.measured.counted = counted
            self.measured.state_bytes = state_bytes(self._optimizer)

    def read_plan_and_meter(self) -> None:
        """Take what our own plan and meter say of a step."""
        for part in optimizers_of(self._optimizer):
            muon = getattr(part, "muon", None)
            if muon is not None:
                self.measured.exchange_rounds += len(muon.plan.rounds)
                if part.stage_group.rank() == 0:
                    self.measured.ns_flops_once += sum(muon.plan.ns_flops())
        self.measured.metered_bytes = int(meter(self._optimizer).sent_bytes)

    def weigh(self) -> None:
        """Measure the peak memory of a step after the first."""
        with self._awake():
            self.measured.peak_bytes = peak_bytes(self._noise.device, self._step)

    def trace(self, folder: Path) -> None:
        """Write a Chrome trace of a step on each rank."""
        folder.mkdir(exist_ok=True)
        with self._awake(), profile(record_shapes=True) as trace:
            with record_function("ProfilerStep#1"):
                self._step()
        trace.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))

    def watch_launches(self) -> None:
        """Count what a step launches on the GPU, and time the host in another one."""
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with self._awake(), profile(activities=activities) as trace:
            self._step()
            torch.cuda.synchronize()
        self.measured.launched = launched(trace.profiler)
        with self._awake():
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._step()
            self.measured.host_ms = 1e3 * (time.perf_counter() - start)
            torch.cuda.synchronize()

    def _step(self) -> None:
        successful, _, _ = self._optimizer.step()
        if not successful:
            raise RuntimeError(
                "Megatron skipped a step: gradients or their norm are not finite"
            )

    def _reduce_gradients(self) -> None:
        with self._watch.part("grad-reduce"):
            for chunk in self._chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    chunk.start_grad_sync()
                chunk.finish_grad_sync()

    def _params(self) -> Iterator[tuple[str, Any]]:
        """Parameters by a key that is the same in all rows and on all ranks with the
        elements.
        """
        from megatron.core import parallel_state as ps

        places = f"stage {ps.get_pipeline_model_parallel_rank()}"
        for number, chunk in enumerate(self._chunks):
            for name, param in chunk.named_parameters():
                key = f"{number} {name} {places}"
                if getattr(param, "tensor_model_parallel", False):
                    key += f" TP {ps.get_tensor_model_parallel_rank()}"
                if not getattr(param, "allreduce", True):
                    key += f" EP {ps.get_expert_model_parallel_rank()}"
                yield key, param

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data
                if buffer.param_data is not None:
                    yield buffer.param_data
        for _, param in self._params():
            yield param.data
        for _, main, _ in main_params(self._optimizer):
            yield main
        yield from states(self._optimizer)

    def _fill(self, flat: Tensor, key: str, start: int) -> None:
        """Fill ``flat`` with the noise of parameter ``key``, from its element ``start``
        on.
        """
        at = (zlib.crc32(key.encode()) + start) % NOISE
        done = 0
        while done < flat.numel():
            run = min(NOISE - at, flat.numel() - done)
            flat[done : done + run].copy_(self._noise[at : at + run])
            done, at = done + run, 0

    def _checksum(self) -> int:
        value = 0
        for _, param in self._params():
            flat = param.data.contiguous().view(-1).view(torch.uint8)
            # a copy, since a storage that numpy has seen can no longer be resized
            value = zlib.crc32(flat.to("cpu", copy=True).numpy(), value)
        return value


def main_params(optimizer: Any) -> Iterator[tuple[Any, Tensor, int]]:
    """(parameter, its fp32 main shard, the parameter's element at which the shard
    begins).
    """
    from megatron_muon.mcore.host.shards import owned_shards

    for part in optimizers_of(optimizer):
        if hasattr(part, "shard_fp32_from_float16_groups"):
            for param, shard in owned_shards(part):
                yield (
                    param,
                    shard,
                    part._get_model_param_range_map(param)["param"].start,
                )
            continue
        for models, mains in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            for param, main in zip(models, mains, strict=True):
                yield param, main, 0


def state_bytes(optimizer: Any) -> int:
    """Bytes of fp32 main parameters and optimizer state on this rank."""
    mains = {id(main): main for _, main, _ in main_params(optimizer)}
    return sum(tensor.nbytes for tensor in (*mains.values(), *states(optimizer)))


def states(optimizer: Any) -> Iterator[Tensor]:
    for part in optimizers_of(optimizer):
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def optimizers_of(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain that are no stubs, also of nested chains."""
    for part in optimizer.chained_optimizers:
        if hasattr(part, "chained_optimizers"):
            yield from optimizers_of(part)
        elif not part.is_stub_optimizer:
            yield part


def checksums_agree(rows: Sequence[Sequence[Measured]]) -> bool:
    """Whether all rows (each a sequence by rank) have the same weights after a step."""
    return len({tuple(measured.weights for measured in ranks) for ranks in rows}) == 1
