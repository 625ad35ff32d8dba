"""Losses by the momentum's dtype: ``cd tests && python -m figures.momentum_dtypes``, on
a GPU. With ``--periods`` they are those by --muon-full-period at TP 2, on two processes
of a CPU, or two that share a GPU. ``--hidden`` takes a larger model.

The quickstart's model, text and schedule, from the same weights for each dtype: the
mean loss of 1,024 held-out windows after the last step. int8 is --muon-momentum-dtype's;
the others are Transformer Engine's FusedAdam's, which must be installed: bf16, fp16 and fp8 for Muon's momentum and AdamW's moments, fp8-first without
AdamW's second moment, fp8-second with it alone.

With ``--bytes`` nothing is trained: the state of examples/gpt_340m on one rank is made
and counted, in bytes of an element of Muon's and of AdamW's beside their bf16 weights.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
from corpus import Corpus, read_corpus

import support.te_on_cpu.on  # noqa: F401
from megatron_muon import cpu
from support import hybrid_on_cpu

if not torch.cuda.is_available():
    cpu.enable()

from megatron_muon.lab.bench.step import build as building
from megatron_muon.lab.bench.step.flags import parsed
from megatron_muon.lab.bench.step.meter import StepTimers
from megatron_muon.lab.ranks import Task, run_ranks
from support.gpu.model import row_of
from support.virtual_gpu.dry_run import ranks_of, world

TOKENS, WARMUP, RATE = 4096, 20, 1e-2
# by hidden size; the first is the quickstart's, the others have 3 and 26 M parameters
SHAPES = {
    128: "--layers 4 --heads 4 --ffn 344 --seq 128",
    256: "--layers 4 --heads 4 --ffn 688 --seq 128",
    512: "--layers 8 --heads 8 --ffn 1376 --seq 256",
}
OF_340M = "--hidden 1536 --layers 12 --heads 12 --vocab 50256 --seq 1024 --tp 1 --dp 1"
FP32, FP8 = torch.float32, torch.uint8
FUSED = {  # the first moment's, which is Muon's momentum's, and AdamW's second moment's
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (FP8, FP8),
    "fp8-first": (FP8, FP32),
    "fp8-second": (FP32, FP8),
    "precision-aware": (FP32, FP32),
    "host": (FP32, FP32),
}
OURS = ("fp32", "int8")
SEEDS = (1234, 2345, 3456)


def _sizes(hidden: int, tp: int) -> str:
    return f"--hidden {hidden} {SHAPES[hidden]} --vocab 256 --swiglu --dp 1 --tp {tp}"


def _optimizer(dtype: str, chunks: list[Any], timers: Any) -> Any:
    import megatron.core.optimizer as core

    fused: dict[str, Any] = {}
    if dtype in FUSED:
        fused["use_precision_aware_optimizer"] = True
        fused["exp_avg_dtype"], fused["exp_avg_sq_dtype"] = FUSED[dtype]
    if dtype == "host":
        hybrid_on_cpu.install()
        fused |= {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
    config = core.OptimizerConfig(
        optimizer="muon", lr=RATE, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95,
        bf16=True,
        params_dtype=torch.bfloat16, use_distributed_optimizer=True, **fused,
    )  # fmt: skip
    config.timers = timers
    return core.get_megatron_optimizer(config, chunks)


@torch.no_grad()
def _draw(chunk: Any, seed: int) -> None:
    tp = torch.distributed.get_world_size()
    for name, param in chunk.named_parameters():
        if param.dim() > 1:
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            shape = list(param.shape)
            is_cut = tp > 1 and param.tensor_model_parallel
            if is_cut:
                shape[param.partition_dim] *= tp
            whole = 0.02 * torch.randn(shape, generator=numbers)
            if is_cut:
                whole = whole.chunk(tp, param.partition_dim)[
                    torch.distributed.get_rank()
                ]
            param.copy_(whole)


def _windows(text: Any, seq: int, seed: int, number: int, count: int) -> Tensor:
    numbers = torch.Generator().manual_seed(100_003 * seed + number)
    starts = torch.randint(0, len(text) - seq - 1, (count,), generator=numbers)
    rows = [
        torch.from_numpy(text[start : start + seq + 1].copy())
        for start in starts.tolist()
    ]
    return torch.stack(rows).long().to(torch.cuda.current_device())


def _loss(chunk: Any, rows: Tensor) -> Tensor:
    positions = torch.arange(rows.shape[1] - 1, device=rows.device).repeat(len(rows), 1)
    losses: Tensor = chunk(rows[:, :-1], positions, None, labels=rows[:, 1:])
    return losses.float().mean()


def _factor(step: int, steps: int) -> float:
    """Of the rate: warm-up, then a cosine to zero."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def _built(dtype: str, sizes: str, period: int = 1) -> building.Built:
    row = row_of("muon-contiguous")
    timers = StepTimers(torch.device(torch.cuda.current_device()))
    held = dtype if dtype in OURS else "fp32"
    config = replace(row.config, momentum_dtype=held, full_period=period)
    row = replace(row, config=config)
    made = lambda row, chunks, timers: _optimizer(dtype, chunks, timers)  # noqa: E731
    with mock.patch.object(building, "_optimizer", made):
        return building.build(row, parsed(sizes.split()), timers)


def counted(dtype: str) -> str:
    """The line of one dtype for ``--bytes``: storages that states and main parameters
    have.
    """
    gc.collect()  # the model before
    nbytes, elements = {True: 0, False: 0}, {True: 0, False: 0}
    for part in _built(dtype, OF_340M).optimizer.chained_optimizers:
        part._fill_state()
        for shard in part._shard_of.values():
            of_muon = part.muon.owns(shard)
            if dtype == "host":
                keys = ["param", "exp_avg"] + ["exp_avg_sq"] * (not of_muon)
                held = [part.states._held(shard, key) for key in keys]
            else:
                held = [*part.optimizer.state[shard].values()]
                held += [shard] if shard.dtype == FP32 else []
            nbytes[of_muon] += sum(getattr(each, "_data", each).nbytes for each in held)
            elements[of_muon] += shard.numel()
    muon, adamw = (f"{nbytes[kind] / elements[kind]:.2f}" for kind in (True, False))
    return f"| {dtype} | {muon} | {adamw} |"


@dataclass(frozen=True)
class Run:
    """One training run."""

    dtype: str
    seed: int
    steps: int
    rate: float
    hidden: int
    period: int = 1

    def loss(self, corpus: Corpus) -> float:
        """The held-out loss, over all ranks by TP."""
        sizes = _sizes(self.hidden, torch.distributed.get_world_size())
        built = _built(self.dtype, sizes, self.period)
        (chunk,), seq = built.chunks, parsed(sizes.split()).seq_length
        _draw(chunk, self.seed)
        built.optimizer.reload_model_params()
        for step in range(self.steps):
            for group in built.optimizer.param_groups:
                group["lr"] = self.rate * _factor(step, self.steps)
            chunk.zero_grad_buffer()
            built.optimizer.zero_grad()
            _loss(
                chunk, _windows(corpus.train, seq, self.seed, step, TOKENS // seq)
            ).backward()
            chunk.finish_grad_sync()
            built.optimizer.step()
        held_out = (
            _windows(corpus.held_out, seq, self.seed, 7919 + at, 64) for at in range(16)
        )
        with torch.no_grad():
            return sum(float(_loss(chunk, rows)) for rows in held_out) / 16


def lines(dtypes: list[str], given: argparse.Namespace) -> Iterator[str]:
    """A line for each dtype: its losses by seed, and their mean."""
    corpus = read_corpus()
    for dtype in dtypes:
        runs = [
            Run(dtype, seed, given.steps, given.rate, given.hidden)
            for seed in given.seeds
        ]
        losses = [each.loss(corpus) for each in runs]
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        yield f"{dtype}: {each}; mean {sum(losses) / len(losses):.4f}"


def on_two_ranks(run: Run) -> float:
    """The held-out loss of a run at TP 2, on a rank."""
    world.initialize_groups(ranks_of(parsed(_sizes(run.hidden, 2).split())))
    return run.loss(read_corpus())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=[*OURS], choices=[*OURS, *FUSED])
    parser.add_argument("--bytes", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--periods", nargs="+", type=int, default=())
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--hidden", type=int, default=128, choices=SHAPES)
    given = parser.parse_args()
    for seed in given.seeds if given.periods else ():
        for period in given.periods:
            one = Run("fp32", seed, given.steps, given.rate, given.hidden, period)
            task = Task(
                on_two_ranks, one, 2, torch.cuda.is_available(), 1, 36_000, builds=True
            )
            loss, _ = run_ranks(task)
            print(
                f"period {period}, seed {seed}, {given.steps} steps: {loss:.4f}",
                flush=True,
            )
    if given.periods:
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    world.initialize_groups(ranks_of(parsed(_sizes(given.hidden, 1).split())))
    if given.bytes:
        print("| | Muon | AdamW |\n|---|--:|--:|", flush=True)
        made = map(counted, given.dtypes)
    else:
        made = lines(given.dtypes, given)
    for line in made:
        print(line, flush=True)


if __name__ == "__main__":
    from figures import momentum_dtypes  # ranks import it by its name

    momentum_dtypes.main()
