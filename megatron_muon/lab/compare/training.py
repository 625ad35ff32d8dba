"""A rank's part in ``megatron-muon compare``: it trains, and measures what a step costs."""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_muon.lab.bench.step.build import Built, build
from megatron_muon.lab.bench.step.measure import main_params, states
from megatron_muon.lab.bench.step.meter import StepTimers, count, peak_bytes
from megatron_muon.lab.bench.step.rows import Row
from megatron_muon.lab.compare import links
from megatron_muon.runtime import collectives

WARM_UP = 2  # steps that are not timed
_PERIOD = 7  # tokens after which a sequence repeats itself
_WORDS = 64  # different tokens of the text


@dataclass(frozen=True, slots=True)
class Job:
    """A training; the same for every rank.

    Attributes:
        flags: flags of the model and its ranks.
        row: the optimizer.
        lr: its learning rate; warmed up over ``WARM_UP`` steps, then constant.
        steps: how many, at least ``WARM_UP`` + 1.
        micro_batch, micro_batches: sequences of a micro-batch, micro-batches of a rank and step.
        link_mbits: rate of each rank's link (see ``links``); None: ranks share the machine's own.
    """

    flags: Namespace
    row: Row
    lr: float
    steps: int
    micro_batch: int
    micro_batches: int
    link_mbits: float | None = None


@dataclass
class Trained:
    """The measurements of one rank.

    Attributes:
        losses: mean loss over all data-parallel ranks of each step; empty but on the last stage.
        step_ms: median over steps, with forward and backward.
        optimizer_ms: median over steps of Megatron's whole ``optimizer.step()``.
        sent: bytes to other ranks in a step's reduction, optimizer step and all-gather, by kind.
        state_bytes: bytes of fp32 main parameters and optimizer state.
        peak_bytes: peak bytes in an optimizer step above those before it.
        link_bytes: mean over steps of all bytes that left by the rank's link, headers included.
    """

    losses: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    optimizer_ms: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    peak_bytes: int = 0
    link_bytes: int = 0


def train(job: Job) -> Trained:
    """Train on this rank; torch's world is up, Megatron's groups are not."""
    from megatron_muon.lab.dry_run.model import ranks_of
    from megatron_muon.lab.dry_run.world import initialize_groups

    initialize_groups(ranks_of(job.flags))
    device = torch.device(torch.cuda.current_device())
    watch = StepTimers(device)
    run = _Run(job, build(job.row, job.flags, watch), watch, device)
    for step in range(job.steps):
        run.step(step)
    run.count_bytes(job.steps)
    run.weigh(job.steps + 1)
    return run.trained()


class _Run:
    def __init__(self, job: Job, built: Built, watch: StepTimers, device: torch.device) -> None:
        self._job, self._chunks, self._optimizer = job, built.chunks, built.optimizer
        self._watch, self._device = watch, device
        self._losses: list[float] = []
        self._times: list[tuple[float, float]] = []
        self._over_link: list[int] = []  # bytes of each timed step
        self._made = Trained()
        config = self._chunks[0].config
        config.pipeline_dtype = torch.bfloat16
        config.finalize_model_grads_func = None  # gradients are reduced below, by themselves
        config.grad_scale_func = self._optimizer.scale_loss

    def step(self, number: int) -> None:
        """Forward, backward, reduction and optimizer step."""
        sent, begin = links.bytes_sent(), self._now()
        self._forward_backward(number)
        self._reduce()
        reduced = self._now()
        self._update(number)
        end = self._now()
        if number >= WARM_UP:
            self._times.append((1e3 * (end - begin), 1e3 * (end - reduced)))
            self._over_link.append(links.bytes_sent() - sent)

    def count_bytes(self, number: int) -> None:
        """Another step, whose bytes are counted."""
        self._forward_backward(number)
        reduced = count(self._watch, self._reduce)
        updated = count(self._watch, partial(self._update, number))
        self._made.sent = updated.sent_bytes | reduced.sent_bytes

    def weigh(self, number: int) -> None:
        """Another one, whose memory is measured."""
        self._forward_backward(number)
        self._reduce()
        self._made.peak_bytes = peak_bytes(self._device, partial(self._update, number))
        mains = {id(main): main for _, main, _ in main_params(self._optimizer)}
        tensors = [*mains.values(), *states(self._optimizer)]
        self._made.state_bytes = sum(tensor.nbytes for tensor in tensors)

    def trained(self) -> Trained:
        """What was measured."""
        made = self._made
        made.losses = self._losses[: self._job.steps]
        made.link_bytes = round(statistics.fmean(self._over_link))
        made.step_ms, made.optimizer_ms = map(statistics.median, zip(*self._times, strict=True))
        return made

    def _forward_backward(self, number: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=self._data(number),
            model=self._chunks,
            num_microbatches=self._job.micro_batches,
            seq_length=self._job.flags.seq_length,
            micro_batch_size=self._job.micro_batch,
            forward_only=False,
        )
        if parallel_state.is_pipeline_last_stage():
            loss = torch.stack([each["loss"] for each in reported]).mean().view(1)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            every = collectives.all_gather_flat("muon/compare", loss, group)
            self._losses.append(torch.cat(every).mean().item())

    def _data(self, number: int) -> Iterator[dict[str, Tensor]]:
        """Sequences that repeat themselves; which ones depends on step and data-parallel rank."""
        from megatron.core import parallel_state

        length = self._job.flags.seq_length + 1
        seed = 1_000_003 * number + parallel_state.get_data_parallel_rank()
        numbers = torch.Generator().manual_seed(seed)
        for _ in range(self._job.micro_batches):
            start = torch.randint(_WORDS, (self._job.micro_batch, _PERIOD), generator=numbers)
            text = start.repeat(1, -(-length // _PERIOD))[:, :length].to(self._device)
            positions = torch.arange(length - 1, device=self._device).expand(len(text), -1)
            yield {"tokens": text[:, :-1], "labels": text[:, 1:], "positions": positions}

    def _reduce(self) -> None:
        with self._watch.part("grad-reduce"):
            for chunk in self._chunks:
                chunk.finish_grad_sync()

    def _update(self, number: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._job.lr * min(1.0, (number + 1) / (WARM_UP + 1))
        successful, _, _ = self._optimizer.step()
        if not successful:
            raise RuntimeError(f"Megatron skipped step {number}: gradients are not finite")

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _forward(data: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """Megatron's ``forward_step_func``."""
    batch = next(data)
    output = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output, _mean


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def train_in_launched_world(job: Job) -> list[Trained]:
    """Train on every rank of a launcher's world; what each has measured, on all of them."""
    from megatron.core import parallel_state

    mine = json.dumps(asdict(train(job)))
    every = collectives.all_gather_texts(mine, None)
    parallel_state.destroy_model_parallel()
    return [Trained(**json.loads(text)) for text in every]


def first_ranks(trained: list[Trained] | None) -> list[Trained] | None:
    """The measurements that rank 0 has read, on every rank of a launcher's world."""
    mine = "" if trained is None else json.dumps([asdict(each) for each in trained])
    text = collectives.all_gather_texts(mine, None)[0]
    return [Trained(**each) for each in json.loads(text)] if text else None


def leave_launched_world() -> None:
    """End a launcher's world on every rank, once none has messages of another to wait for.

    A rank that ends with gloo's threads still at work may abort.
    """
    collectives.all_gather_texts("", None)
    torch.distributed.destroy_process_group()
