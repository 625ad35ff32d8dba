"""The model of tests/gpu: a small GPT, as ``bench step`` builds it, and its ranks."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_muon.lab.bench.step.build import Built, build
from megatron_muon.lab.bench.step.flags import parsed
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.lab.bench.step.rows import Row, rows
from megatron_muon.lab.ranks import Task, run_ranks, threads_for
from megatron_muon.settings.config import MuonConfig
from support.gpu.settings import Settings
from support.virtual_gpu.dry_run import ranks_of, world

_TINY = "--hidden 64 --layers 2 --heads 4 --vocab 512 --seq 32"
_LARGE = "--hidden 2048 --layers 4 --heads 16 --vocab 32000 --seq 1024"


def arguments(settings: Settings, *, tiny: bool = False) -> list[str]:
    """Flags of ``bench step`` for the model and its ranks; on GPUs a larger one if not
    ``tiny``.
    """
    tp = 2 if settings.ranks % 2 == 0 else 1  # TP has every matrix exchanged
    sizes = _TINY if tiny or settings.device == "cpu" else _LARGE
    return [*sizes.split(), "--tp", str(tp), "--dp", str(settings.ranks // tp)]


def flags_of(settings: Settings, *, tiny: bool = False) -> Namespace:
    """Megatron's flags of that model."""
    return parsed(arguments(settings, tiny=tiny))


def row_of(name: str, rule: str = "muon") -> Row:
    """A row of ``bench step`` with Moonlight's settings, and a rule."""
    (row,) = rows(MuonConfig(rule=rule), [name])
    return row


def on_ranks(settings: Settings, run: Any, argument: Any, seconds: float) -> list[Any]:
    """What ``run(argument)`` returns on each rank; RankError where one raised, died or
    was late.
    """
    threads = threads_for(settings.ranks, None)
    task = Task(
        run, argument, settings.ranks, settings.gpus, threads, seconds, builds=True
    )
    return run_ranks(task)


def built_on_rank(
    settings: Settings, row: str = "muon-contiguous", rule: str = "muon"
) -> Built:
    """The tiny model with a row's optimizer, on a rank; Megatron's groups are made if
    need be.
    """
    from megatron.core import parallel_state

    flags = flags_of(settings, tiny=True)
    if not parallel_state.model_parallel_is_initialized():
        world.initialize_groups(ranks_of(flags))
    timers = StepTimers(torch.device(torch.cuda.current_device()))
    return build(row_of(row, rule), flags, timers)


def named_params(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of every chunk of this rank's model."""
    for number, chunk in enumerate(chunks):
        for name, param in chunk.named_parameters():
            yield f"{number} {name}", param


@torch.no_grad()
def fill(tensor: Tensor, key: str, scale: float) -> None:
    """Fill a tensor with normal noise that follows from ``key`` alone, made on the
    CPU.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
