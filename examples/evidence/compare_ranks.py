"""What each rank of compare.py does: it trains, and measures what a step costs."""

from __future__ import annotations

import os
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_muon.lab.bench.step.build import build
from megatron_muon.lab.bench.step.measure import start_megatron, state_bytes
from megatron_muon.lab.bench.step.meter import StepTimers, count, peak_bytes
from megatron_muon.lab.bench.step.rows import Row
from megatron_muon.runtime import collectives

WARM_UP = 2  # steps that are not timed
PERIOD = 7  # tokens after which a sequence repeats itself
WORDS = 64  # different tokens of the text


@dataclass(frozen=True)
class Job:
    """A training; the same for every rank. ``lr`` is warmed up over WARM_UP steps, then
    constant.

    ``micro_batch`` counts sequences, ``micro_batches`` those of a rank and step.
    """

    flags: Namespace
    row: Row
    lr: float
    steps: int
    micro_batch: int
    micro_batches: int


def train(job: Job) -> dict[str, Any]:
    """Trains on this rank, whose torch world is up and whose Megatron groups are not.

    Returns ``losses`` (the mean over data-parallel ranks of each step, on the last
    stage alone), ``step_ms`` and ``optimizer_ms`` (medians), ``sent`` (bytes to other
    ranks in a step's reduction, optimizer step and all-gather, by kind),
    ``state_bytes`` and ``peak_bytes``.
    """
    run = Training(job, start_megatron(job.flags))
    times = [run.timed(step) for step in range(job.steps)][WARM_UP:]
    step_ms, optimizer_ms = map(statistics.median, zip(*times, strict=True))
    losses = list(run.losses)
    run.forward_backward(job.steps)
    reduced = count(run.watch, run.reduce)
    updated = count(run.watch, partial(run.update, job.steps))
    run.forward_backward(job.steps + 1)
    run.reduce()
    peak = peak_bytes(run.device, partial(run.update, job.steps + 1))
    return {
        "losses": losses,
        "step_ms": step_ms,
        "optimizer_ms": optimizer_ms,
        "sent": updated.sent_bytes | reduced.sent_bytes,
        "state_bytes": state_bytes(run.optimizer),
        "peak_bytes": peak,
    }


class Training:
    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device, self.watch = job, device, StepTimers(device)
        built = build(job.row, job.flags, self.watch)
        self.chunks, self.optimizer = built.chunks, built.optimizer
        self.losses: list[float] = []
        config = self.chunks[0].config
        config.pipeline_dtype = torch.bfloat16
        config.finalize_model_grads_func = (
            None  # gradients are reduced below, by themselves
        )
        config.grad_scale_func = self.optimizer.scale_loss

    def timed(self, number: int) -> tuple[float, float]:
        """Milliseconds of a whole step, and of ``optimizer.step()`` in it."""
        begin = self.now()
        self.forward_backward(number)
        self.reduce()
        reduced = self.now()
        self.update(number)
        end = self.now()
        return 1e3 * (end - begin), 1e3 * (end - reduced)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forward_backward(self, number: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self.data(number),
            model=self.chunks,
            num_microbatches=self.job.micro_batches,
            seq_length=self.job.flags.seq_length,
            micro_batch_size=self.job.micro_batch,
            forward_only=False,
        )
        if parallel_state.is_pipeline_last_stage():
            loss = torch.stack([each["loss"] for each in reported]).mean().view(1)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            every = loss.new_empty(group.size())
            dist.all_gather_into_tensor(every, loss, group=group)
            self.losses.append(every.mean().item())

    def data(self, number: int) -> Iterator[dict[str, Tensor]]:
        """Sequences that repeat themselves; which ones depends on step and
        data-parallel rank.
        """
        from megatron.core import parallel_state

        length = self.job.flags.seq_length + 1
        seed = 1_000_003 * number + parallel_state.get_data_parallel_rank()
        numbers = torch.Generator().manual_seed(seed)
        for _ in range(self.job.micro_batches):
            start = torch.randint(
                WORDS, (self.job.micro_batch, PERIOD), generator=numbers
            )
            text = start.repeat(1, -(-length // PERIOD))[:, :length].to(self.device)
            positions = torch.arange(length - 1, device=self.device).expand(
                len(text), -1
            )
            yield {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "positions": positions,
            }

    def reduce(self) -> None:
        with self.watch.part("grad-reduce"):
            for chunk in self.chunks:
                chunk.finish_grad_sync()

    def update(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.lr * min(1.0, (number + 1) / (WARM_UP + 1))
        successful, _, _ = self.optimizer.step()
        if not successful:
            raise RuntimeError(
                f"Megatron skipped step {number}: gradients are not finite"
            )


def forward(data: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron's forward_step_func."""
    batch = next(data)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, mean


def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def join_world(gpus: bool) -> None:
    """Joins a launcher's world."""
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if gpus else "gloo")


def leave_world() -> None:
    """Ends it once no rank waits for another: one with gloo's threads at work may
    abort.
    """
    first_ranks(None)
    torch.distributed.destroy_process_group()


def train_in_launched_world(job: Job) -> list[dict[str, Any]]:
    """Trains on every rank of a launcher's world; all get the measurements of all."""
    from megatron.core import parallel_state

    every = collectives.all_gather_json(train(job), None)
    parallel_state.destroy_model_parallel()
    return every


def first_ranks(value: Any) -> Any:
    """What rank 0 of a launcher's world has, on every rank."""
    return collectives.all_gather_json(value, None)[0]
