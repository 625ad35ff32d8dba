"""Losses by the momentum's dtype: ``cd tests && python -m figures.momentum_dtypes``, on a GPU.
With ``--periods`` they are those by --muon-full-period at TP 2, on two processes of a CPU.

The quickstart's model, text and schedule, from the same weights for each dtype: the mean loss of
1,024 held-out windows after the last step. bf16, fp16 and fp8 are Transformer Engine's FusedAdam's,
for Muon's momentum and for both of AdamW's moments; they need it installed.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
from corpus import Corpus, read_corpus

from megatron_muon import cpu

if not torch.cuda.is_available():
    cpu.enable()

from megatron_muon.lab.bench.step import build as building
from megatron_muon.lab.bench.step.flags import parsed
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.settings.config import MuonConfig
from support.gpu.model import row_of
from support.ranks import run
from support.virtual_gpu.dry_run import ranks_of, world

SEQ, BATCH, WARMUP, RATE = 128, 32, 20, 1e-2
SIZES = f"--hidden 128 --layers 4 --heads 4 --ffn 344 --vocab 256 --seq {SEQ} --swiglu --dp 1 --tp"
FUSED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
SEEDS = (1234, 2345, 3456)


def _optimizer(dtype: str, chunks: list[Any], timers: Any) -> Any:
    import megatron.core.optimizer as core

    fused: dict[str, Any] = {"use_precision_aware_optimizer": True} if dtype in FUSED else {}
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if fused else ():
        fused[name] = FUSED[dtype]
    config = core.OptimizerConfig(
        optimizer="muon", lr=RATE, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95, bf16=True,
        params_dtype=torch.bfloat16, use_distributed_optimizer=True, **fused,
    )  # fmt: skip
    config.timers = timers
    return core.get_megatron_optimizer(config, chunks)


@torch.no_grad()
def _draw(chunk: Any, seed: int) -> None:
    for name, param in chunk.named_parameters():
        if param.dim() > 1:
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            shape, tp = list(param.shape), torch.distributed.get_world_size()
            cut = param.partition_dim if tp > 1 and param.tensor_model_parallel else 0
            shape[cut] *= tp if tp > 1 and param.tensor_model_parallel else 1
            whole = 0.02 * torch.randn(shape, generator=numbers)
            own = torch.distributed.get_rank() if shape != list(param.shape) else 0
            param.copy_(whole.split(param.shape[cut], cut)[own])


def _windows(text: Any, seed: int, number: int, count: int, device: Any) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100_003 * seed + number)
    starts = torch.randint(0, len(text) - SEQ - 1, (count,), generator=numbers)
    rows = [torch.from_numpy(text[start : start + SEQ + 1].copy()) for start in starts.tolist()]
    return torch.stack(rows).long().to(device)


def _loss(chunk: Any, rows: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(SEQ, device=rows.device).repeat(len(rows), 1)
    losses: torch.Tensor = chunk(rows[:, :-1], positions, None, labels=rows[:, 1:])
    return losses.float().mean()


def _rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def trained(
    config: MuonConfig, seed: int, steps: int, corpus: Corpus, dtype: str = "fp32"
) -> float:
    """The held-out loss of one run, over all ranks by TP."""
    flags, device = _flags(torch.distributed.get_world_size()), torch.cuda.current_device()
    row, device = replace(row_of("muon-contiguous"), config=config), torch.device(device)
    made = lambda row, flags, chunks, timers: _optimizer(dtype, chunks, timers)  # noqa: E731
    with mock.patch.object(building, "_optimizer", made):
        built = building.build(row, flags, StepTimers(device))
    (chunk,) = built.chunks
    _draw(chunk, seed)
    built.optimizer.reload_model_params()
    for step in range(steps):
        for group in built.optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        chunk.zero_grad_buffer()
        built.optimizer.zero_grad()
        _loss(chunk, _windows(corpus.train, seed, step, BATCH, device)).backward()
        chunk.finish_grad_sync()
        built.optimizer.step()
    held_out = (_windows(corpus.held_out, seed, 7919 + at, 64, device) for at in range(16))
    with torch.no_grad():
        return sum(float(_loss(chunk, rows)) for rows in held_out) / 16


def lines(dtypes: list[str], seeds: list[int], steps: int) -> Iterator[str]:
    """A line for each dtype: its losses by seed, and their mean."""
    corpus = read_corpus()
    for dtype in dtypes:
        config = MuonConfig(momentum_dtype="int8" if dtype == "int8" else "fp32")
        losses = [trained(config, seed, steps, corpus, dtype) for seed in seeds]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        yield f"{dtype}: {each}; mean {sum(losses) / len(losses):.4f}"


def _in_turns(period: int, seed: int, steps: int) -> float:
    world.initialize_groups(ranks_of(_flags(2)))
    return trained(MuonConfig(full_period=period), seed, steps, read_corpus())


def _flags(tp: int) -> argparse.Namespace:
    return parsed([*SIZES.split(), str(tp)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    of_all = ["fp32", "int8"]
    parser.add_argument("--dtypes", nargs="+", default=of_all, choices=[*of_all, *FUSED])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--periods", nargs="+", type=int, default=())
    given = parser.parse_args()
    for seed in given.seeds if given.periods else ():
        for period in given.periods:
            loss, _ = run(_in_turns, 2, period, seed, given.steps, timeout=36_000)
            print(f"period {period}, seed {seed}, {given.steps} steps: {loss:.4f}", flush=True)
    if given.periods:
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    world.initialize_groups(ranks_of(_flags(1)))
    for line in lines(given.dtypes, given.seeds, given.steps):
        print(line, flush=True)


if __name__ == "__main__":
    from figures import momentum_dtypes  # ranks import it by its name

    momentum_dtypes.main()
