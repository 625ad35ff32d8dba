"""A small GPT learns with Muon: forward, backward, reduction and step on the device.

The model is this command's own. The quickstart would train longer, but it is not in the wheel, and
it reads a corpus and flags of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.lab.accept.checks.model import flags_of, row_of, task_of
from megatron_muon.lab.accept.outcome import Finding
from megatron_muon.lab.accept.settings import Settings
from megatron_muon.runtime import collectives

_STEPS = 30
_BATCH = 8
_FALL = 0.75  # of the first loss may be left: 64 of the 512 tokens are in the text
_PERIOD = 7
_LR = 0.01


def run(settings: Settings) -> list[Finding]:
    """Train on all ranks, and look at the losses."""
    from megatron_muon.lab.bench.ranks import run_ranks

    if settings.device == "virtual":
        return [Finding("a small GPT learns", "not run", settings.why_no_gpu)]
    task = task_of(settings, train, settings, 110.0)
    return [judged(run_ranks(task))]


def judged(ranks: list[list[float]]) -> Finding:
    """Whether the loss is finite, the same on all ranks, and falls."""
    name, losses = "a small GPT learns", ranks[0]
    text = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    if not all(math.isfinite(loss) for loss in losses):
        return Finding(name, "FAILED", f"a loss is not finite: {text}")
    if any(other != losses for other in ranks):
        return Finding(name, "FAILED", "ranks have other losses after their all-reduce")
    if losses[-1] > _FALL * losses[0]:
        return Finding(name, "FAILED", f"{text}: more than {_FALL:g} of the first is left")
    return Finding(name, "ok", text)


def train(settings: Settings) -> list[float]:
    """The mean loss over all ranks of each step; torch's world is up."""
    from megatron_muon.lab.bench.step.build import build
    from megatron_muon.lab.bench.step.meter import StepTimers
    from megatron_muon.lab.dry_run.model import ranks_of
    from megatron_muon.lab.dry_run.world import initialize_groups

    flags = flags_of(settings, tiny=True)
    initialize_groups(ranks_of(flags))
    device = torch.device(torch.cuda.current_device())
    built = build(row_of("muon-contiguous"), flags, StepTimers(device))
    (chunk,) = built.chunks
    for group in built.optimizer.param_groups:
        group["lr"] = _LR
    losses = []
    for step in range(_STEPS):
        chunk.zero_grad_buffer()
        built.optimizer.zero_grad()
        loss = _loss(chunk, flags, step, device)
        loss.backward()  # type: ignore[no-untyped-call]
        chunk.finish_grad_sync()
        successful, _, _ = built.optimizer.step()
        if not successful:
            raise RuntimeError(f"Megatron skipped step {step}: gradients are not finite")
        world = dist.group.WORLD
        assert world is not None
        every = collectives.all_gather_flat("muon/accept", loss.detach().view(1), world)
        losses.append(torch.cat(every).mean().item())
    return losses


def _loss(chunk: Any, flags: Any, step: int, device: torch.device) -> torch.Tensor:
    """The mean over the tokens of this DP rank's text, which repeats itself."""
    from megatron.core import parallel_state

    seed = 1000 * step + parallel_state.get_data_parallel_rank()
    numbers = torch.Generator().manual_seed(seed)
    start = torch.randint(64, (_BATCH, _PERIOD), generator=numbers)
    length = flags.seq_length + 1
    text = start.repeat(1, -(-length // _PERIOD))[:, :length].to(device)
    positions = torch.arange(flags.seq_length, device=device).repeat(_BATCH, 1)
    losses: torch.Tensor = chunk(text[:, :-1], positions, None, labels=text[:, 1:])
    return losses.float().mean()
