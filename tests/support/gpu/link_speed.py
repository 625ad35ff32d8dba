"""The speed of a rank's link, measured on all ranks at once."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.planning.slices import ALIGNED
from megatron_muon.runtime import collectives


@dataclass(frozen=True, slots=True)
class LinkJob:
    """What to measure on every rank."""

    message_bytes: int  # bytes that a rank sends in an all-to-all
    rounds: int  # number of measurements
    gpu: bool  # whether to measure on a GPU


def link_gbytes(job: LinkJob) -> float:
    """GB/s that this rank sends, while it receives as much, in the median round."""
    device = torch.device("cpu")
    if job.gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    assert group is not None
    here = group.rank()
    size = group.size()
    each = max(1, job.message_bytes // 2 // (size - 1) // ALIGNED)
    each *= ALIGNED  # else NCCL copies one byte a load
    peers = [(rank, each) for rank in range(size) if rank != here]
    places = collectives.consecutive(peers)
    world = collectives.world_ranks(group)
    route = collectives.Route.of(group, world, here, places, places)
    sent = torch.ones(each * len(peers), dtype=torch.bfloat16, device=device)
    rates = []
    for _ in range(1 + job.rounds):
        collectives.all_gather_numbers([0], None, device)
        start = time.perf_counter()
        pending = collectives.start_messages("muon/bench", sent, route)
        assert pending is not None
        pending.wait()
        if job.gpu:
            torch.cuda.synchronize(device)
        rates.append(sent.nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates[1:])  # the first round also makes the connections
