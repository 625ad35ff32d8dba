"""``megatron-muon bench speeds``: the two speeds for the choice of homes, as flags to
paste.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from megatron_muon.lab.bench.newton_schulz import interleaved, shape_of
from megatron_muon.lab.dry_run.numbers import MOST_HERE, count
from megatron_muon.lab.outputs import parser_of
from megatron_muon.lab.ranks import Task, gpus_for, run_ranks, threads_for
from megatron_muon.lab.tables import digits, show
from megatron_muon.orthogonalize.iteration import ns_flops
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on
from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.planning.slices import ALIGNED
from megatron_muon.runtime import collectives
from megatron_muon.settings.config import MuonConfig

_DESCRIPTION = """\
Start ranks on this machine, with a GPU per rank over NCCL, or without GPUs over
gloo. On all of them at once, measure the speed of Newton-Schulz, then that of
the exchange's all-to-all. The last line has the flags for a run. A run itself
never measures: give all of its ranks the same flags."""

_GPU_SHAPE, _CPU_SHAPE = (4096, 14336), (512, 2048)
_MESSAGE, _ROUNDS = 64 << 20, 5


@dataclass(frozen=True, slots=True)
class SpeedsJob:
    """The measurements to make on every rank."""

    config: MuonConfig  # settings of the iteration
    shape: tuple[int, int]  # (rows, cols) of the matrix
    message_bytes: int  # bytes that a rank sends in an all-to-all
    rounds: int  # number of measurements of each speed
    gpu: bool  # whether to measure on a GPU


@dataclass(frozen=True, slots=True)
class Speeds:
    """A rank's speeds: in 10¹² flop/s; in 10⁹ bytes/s, None where there is only one
    rank.
    """

    rank_tflops: float
    link_gbytes: float | None


def main(argv: Sequence[str]) -> int:
    """Run the command; wrong arguments end the process with status 2, as argparse
    does.
    """
    parser = parser_of("megatron-muon bench speeds", _DESCRIPTION)
    text = "ranks to start (default: one for each GPU; 2 on a CPU)"
    parser.add_argument("--ranks", type=count(most=MOST_HERE), metavar="N", help=text)
    gpu, cpu = ("x".join(map(str, shape)) for shape in (_GPU_SHAPE, _CPU_SHAPE))
    text = f"shape of the matrix (default: {gpu}; on a CPU {cpu})"
    parser.add_argument("--shape", type=shape_of, metavar="ROWSxCOLS", help=text)
    args = parser.parse_args(argv)
    try:
        task = _task(args)
    except ValueError as error:
        parser.error(str(error))
    _report(task, run_ranks(task))
    return 0


def measure(job: SpeedsJob) -> Speeds:
    """This rank's speeds, measured while all others measure theirs; torch's world is
    up.
    """
    device = torch.device("cpu")
    if job.gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(*job.shape, generator=torch.Generator().manual_seed(0))
    numerics = numerics_on(device, job.config)
    matrix = matrix.to(device, TORCH_DTYPE[numerics.travels])
    run = partial(orthogonalize, config=job.config)
    _meet(device)
    (milliseconds,) = interleaved([run], matrix, job.rounds, time.perf_counter)
    flops = ns_flops(*job.shape, numerics)
    return Speeds(
        flops / statistics.median(milliseconds) / 1e9, _link_gbytes(job, device)
    )


def _link_gbytes(job: SpeedsJob, device: torch.device) -> float | None:
    """GB/s that this rank sends, while it receives as much, in the median round."""
    group = dist.group.WORLD
    assert group is not None
    here = group.rank()
    size = group.size()
    if size == 1:
        return None
    dtype = TORCH_DTYPE[numerics_on(device, job.config).travels]
    each = max(1, job.message_bytes // dtype.itemsize // (size - 1) // ALIGNED)
    each *= ALIGNED  # else NCCL copies one byte a load
    peers = [(rank, each) for rank in range(size) if rank != here]
    places = collectives.consecutive(peers)
    world = collectives.world_ranks(group)
    route = collectives.Route.of(group, world, here, places, places)
    sent = torch.ones(each * len(peers), dtype=dtype, device=device)
    rates = []
    for _ in range(1 + job.rounds):
        _meet(device)
        start = time.perf_counter()
        pending = collectives.start_messages("muon/bench", sent, route)
        assert pending is not None
        pending.wait()
        if job.gpu:
            torch.cuda.synchronize(device)
        rates.append(sent.nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates[1:])  # the first round also makes the connections


def _meet(device: torch.device) -> None:
    collectives.all_gather_numbers([0], None, device)


def _task(args: Namespace) -> Task:
    world = args.ranks or torch.cuda.device_count() or 2
    gpu = gpus_for(world, "--ranks", "--ranks")
    shape = args.shape or (_GPU_SHAPE if gpu else _CPU_SHAPE)
    job = SpeedsJob(MuonConfig(), shape, _MESSAGE, _ROUNDS, gpu)
    return Task(
        measure, job, world, gpus=gpu, threads=threads_for(world, None), seconds=600.0
    )


def _report(task: Task, ranks: Sequence[Speeds]) -> None:
    """Print the measurements, and their medians over ranks as flags."""
    job: SpeedsJob = task.argument
    rows, cols = job.shape
    numerics = numerics_on(torch.device("cuda" if job.gpu else "cpu"), job.config)
    where = "GPU" if job.gpu else f"CPU, {task.threads} thread(s)"
    tflops = [rank.rank_tflops for rank in ranks]
    show(
        f"Newton-Schulz of {rows}x{cols}, {numerics.iteration}, {job.config.ns_steps} "
        f"steps, {numerics.dtype}, {task.world} rank(s) at once, each a {where}: "
        f"{_spread(tflops)} TFLOP/s a rank"
    )
    flags = [f"--muon-rank-tflops {_median(tflops)}"]
    gbytes = [rank.link_gbytes for rank in ranks if rank.link_gbytes is not None]
    if gbytes:
        show(
            f"all-to-all over {'nccl' if job.gpu else 'gloo'}, {task.world} ranks of "
            f"this machine, {job.message_bytes >> 20} MiB from each: {_spread(gbytes)} "
            "GB/s a rank",
            "where a run's stages span machines, give the network's speed per rank",
        )
        flags.append(f"--muon-link-gbytes {_median(gbytes)}")
    else:
        show(
            "one rank has no link to measure: --ranks 2 or more, or give the network's "
            "speed"
        )
    print(*flags)


def _median(speeds: Sequence[float]) -> str:
    return digits(statistics.median(speeds))


def _spread(speeds: Sequence[float]) -> str:
    return f"{_median(speeds)} ({digits(min(speeds))} to {digits(max(speeds))})"
