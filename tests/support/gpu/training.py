"""A small GPT learns with Muon: forward, backward, reduction and step on the device."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_muon
from megatron_muon.settings.rules import RULES
from support.gpu.model import built_on_rank, flags_of
from support.gpu.settings import Settings

_STEPS = 30
_BATCH = 8
_FALL = 0.75  # of the first loss may be left: 64 of the 512 tokens are in the text
_PERIOD = 7
_LR = 0.01


def faults(ranks: list[list[float]]) -> str:
    """Why the losses of all ranks are no training; empty where they are."""
    losses = ranks[0]
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    if any(other != losses for other in ranks):
        return "ranks have other losses after their all-reduce"
    if losses[-1] > _FALL * losses[0]:
        return f"more than {_FALL:g} of the first loss is left"
    return ""


def train_by_rules(settings: Settings) -> dict[str, list[float]]:
    """``train`` with each rule but Muon's own, one after the other."""
    losses = {}
    for rule in RULES:
        if rule != "muon":
            megatron_muon.uninstall()
            losses[rule] = train((settings, "muon-contiguous", rule))
    return losses


def train(job: tuple[Settings, str, str]) -> list[float]:
    """The mean loss over all ranks of each step of a row's optimizer with a rule;
    torch's world is up.
    """
    settings, row, rule = job
    flags = flags_of(settings, tiny=True)
    built = built_on_rank(settings, row, rule)
    device = torch.device(torch.cuda.current_device())
    (chunk,) = built.chunks
    for group in built.optimizer.param_groups:
        group.update(lr=_LR, weight_decay=0.0)  # hyperball takes no decay
    losses = []
    for step in range(_STEPS):
        chunk.zero_grad_buffer()
        built.optimizer.zero_grad()
        loss = _loss(chunk, flags, step, device)
        loss.backward()
        chunk.finish_grad_sync()
        successful, _, _ = built.optimizer.step()
        if not successful:
            raise RuntimeError(
                f"Megatron skipped step {step}: gradients are not finite"
            )
        every = loss.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(every, loss.detach().view(1))
        losses.append(every.mean().item())
    return losses


def _loss(chunk: Any, flags: Any, step: int, device: torch.device) -> Tensor:
    """The mean over the tokens of this DP rank's text, which repeats itself."""
    from megatron.core import parallel_state

    seed = 1000 * step + parallel_state.get_data_parallel_rank()
    numbers = torch.Generator().manual_seed(seed)
    start = torch.randint(64, (_BATCH, _PERIOD), generator=numbers)
    length = flags.seq_length + 1
    text = start.repeat(1, -(-length // _PERIOD))[:, :length].to(device)
    positions = torch.arange(flags.seq_length, device=device).repeat(_BATCH, 1)
    losses: Tensor = chunk(text[:, :-1], positions, None, labels=text[:, 1:])
    return losses.float().mean()
