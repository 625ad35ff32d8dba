"""Megatron's whole training step with Muon inside, of one rank, on a virtual GPU.

Real: Megatron's model, its DDP with buffers and overlaps, DistributedOptimizer,
ChainedOptimizer,
clipping, and the package. Not real: forward and backward, which here only read
parameters and write gradients, and Transformer Engine's fused kernels (``fused``). Nor
is what other ranks say while the optimizer is built.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_muon.cpu.table import FOR_MODULES
from megatron_muon.lab.dry_run.stages import Chooser
from megatron_muon.mcore.host.loop import NO_HOST, set_host
from megatron_muon.mcore.wiring import build
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.runtime import collectives
from megatron_muon.runtime.patches import Patches, replaced
from megatron_muon.settings.config import MuonConfig
from support.installed import installed
from support.virtual_gpu.device.fused import fused_kernels
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.tensors import CUDA, VirtualTensor
from support.virtual_gpu.dry_run import Ranks, build_chunks, transformer_config, world
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.step import closed, virtual_gpu
from support.virtual_gpu.trace import IterationStart, StepStart


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Settings of Megatron's optimizer that matter here."""

    optimizer: Literal["muon", "adam"] = "muon"  # ``adam`` is Megatron untouched
    clip_grad: float = 1.0  # the gradients' norm above which they are scaled; 0: never
    steps: int = 2  # training steps; counts are of the last one


@dataclass(frozen=True, slots=True)
class RecordedTraining:
    """A rank after its training steps."""

    recording: Recording  # what it did
    # those of its optimizers with Muon, in the order in which they step
    plans: tuple[ExchangePlan, ...]


def record_training(
    flags: Namespace,
    ranks: Ranks,
    rank: int,
    config: MuonConfig,
    training: OptimizerSettings,
    *,
    leaves_buckets: bool = False,
) -> RecordedTraining:
    """A rank's training steps of the model; counts are of the last one.

    Muon is installed before the chunks are built, since it can lay out their buckets,
    and only for that time. The counted step begins where ``optimizer.step()`` does;
    what comes before is in the races.
    """
    with (
        virtual_gpu() as gpu,
        world.as_rank(rank, ranks),
        _megatron(gpu),
        installed(config),
    ):
        set_host(Chooser(leaves_buckets=leaves_buckets))
        try:
            chunks, optimizer = _built(flags, ranks, config, training)
        finally:
            set_host(NO_HOST)
        for step in range(training.steps):
            _train(gpu, flags, chunks, optimizer, first=step == 0)
        return RecordedTraining(
            closed(rank, gpu, _held(chunks, optimizer)), _plans(optimizer)
        )


@contextmanager
def _megatron(gpu: Gpu) -> Iterator[None]:
    """Megatron's modules, fused kernels and random states, as on a machine with a
    GPU.
    """
    from megatron.core.tensor_parallel import random

    fork = contextlib.nullcontext
    tracker = type(random.get_cuda_rng_tracker())
    patches = Patches(by="support.virtual_gpu")
    with ExitStack() as stack:
        stack.callback(patches.undo)
        for replace in FOR_MODULES:  # the CPU runtime, which has them too, is off here
            replace(patches)
        stack.enter_context(fused_kernels(gpu))
        stack.enter_context(replaced(tracker, fork=lambda *a, **k: fork()))
        yield


def _built(
    flags: Namespace, ranks: Ranks, config: MuonConfig, training: OptimizerSettings
) -> tuple[list[Any], Any]:
    from megatron.core import optimizer as megatron_optimizer

    transformer = transformer_config(flags, ranks)
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        if hasattr(transformer, name):
            setattr(transformer, name, lambda tensor: tensor)
    transformer.gradient_accumulation_fusion = False
    with torch.device(CUDA):
        chunks = build_chunks(flags, transformer)
    with _others_agree(ranks, config), contextlib.redirect_stdout(io.StringIO()):
        optimizer = megatron_optimizer.get_megatron_optimizer(
            _optimizer_config(flags, training), chunks, use_gloo_process_groups=False
        )
    return chunks, optimizer


def _optimizer_config(flags: Namespace, training: OptimizerSettings) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    settings = OptimizerConfig(
        optimizer=training.optimizer,
        lr=1e-3,
        bf16=flags.bf16,
        fp16=flags.fp16,
        use_distributed_optimizer=True,
        clip_grad=training.clip_grad,
        weight_decay=0.1,
    )
    if hasattr(settings, "overlap_param_gather"):
        settings.overlap_param_gather = flags.overlap_param_gather
    return settings


@contextmanager
def _others_agree(ranks: Any, config: MuonConfig) -> Iterator[None]:
    """While Muon is built, the other ranks say what they would say.

    The host reads 0 from every tensor: no rank has an error, and all agree. Only where
    ranks must say different things is the answer made here.
    """

    def grid(every: Any, near: int) -> Any:
        return world.grid(ranks, config.node_ranks, experts=every[0].ep_size > 1)

    def instance(color: Sequence[int], like: Any, device: Any) -> Any:
        return parallel_state.create_group(_ranks_of_instance(ranks, like, color[-1]))

    with ExitStack() as stack:
        for owner, name, value in (
            (build, "grid_of", grid),
            (build, "start_lines", lambda *args, **options: []),
            (collectives, "split_world", instance),
            # of the world
            (collectives, "all_gather_numbers", lambda own, *_: [own] * ranks.world),
            (collectives, "all_gather_json", lambda own, *_: [own] * ranks.world),
        ):
            stack.enter_context(replaced(owner, **{name: value}))
        yield


def _ranks_of_instance(ranks: Any, stage: Any, instance: int) -> list[int]:
    """The ranks of a stage that are in one instance of the distributed optimizer."""
    dp = ranks.world // (ranks.tp * ranks.cp * ranks.pp)
    sizes = {"tp": ranks.tp, "ep": 1, "dp": dp, "pp": ranks.pp, "cp": ranks.cp}
    groups = parallel_state.RankGenerator(**sizes, order=ranks.order).get_ranks("dp-cp")
    each = len(groups[0]) // ranks.instances
    inside = {
        rank for group in groups for rank in sorted(group)[instance * each :][:each]
    }
    return [rank for rank in dist.get_process_group_ranks(stage) if rank in inside]


@torch.no_grad()
def _train(
    gpu: Gpu, flags: Namespace, chunks: Sequence[Any], optimizer: Any, *, first: bool
) -> None:
    trace = gpu.trace
    trace.events.append(IterationStart())
    with trace.named("zero"):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
    with trace.named("forward"):
        for chunk in chunks:
            for param in chunk.parameters():
                if flags.overlap_param_gather and not first:
                    chunk.param_to_bucket_group[param].finish_param_sync()
                gpu.launch("forward", [param], [])
    with trace.named("backward"):
        for chunk in reversed(chunks):
            _go_backward(gpu, chunk, overlap=flags.overlap_grad_reduce)
        for chunk in chunks:
            chunk.finish_grad_sync()
    trace.events.append(StepStart())
    with trace.named("optimizer"):
        optimizer.step()


def _go_backward(gpu: Gpu, chunk: Any, *, overlap: bool) -> None:
    for param in reversed(list(chunk.parameters())):
        gpu.launch("backward", [param], [param.main_grad])
        param.grad_added_to_main_grad = True
        if overlap:
            chunk.param_to_bucket_group[param].register_grad_ready(param)


def _plans(optimizer: Any) -> tuple[ExchangePlan, ...]:
    muons = [getattr(part, "muon", None) for part in _parts(optimizer)]
    return tuple(muon.plan for muon in muons if muon is not None)


def _parts(optimizer: Any) -> list[Any]:
    """Megatron's DistributedOptimizers that have something to step."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not getattr(part, "is_stub_optimizer", False)]


def _held(chunks: Sequence[Any], optimizer: Any) -> dict[int, str]:
    """The kind of each block of a rank's state."""
    held: dict[int, str] = {}

    def name(tensor: Any, kind: str) -> None:
        if isinstance(tensor, VirtualTensor):
            held.setdefault(tensor.block.number, kind)

    for chunk in chunks:
        for param in chunk.parameters():
            name(param, "parameters")
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            name(buffer.grad_data, "gradients")
    for part in _parts(optimizer):
        muon = getattr(part, "muon", None)
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                name(param, "main parameters")
        for shard, state in part.optimizer.state.items():
            is_muons = muon is not None and muon.owns(shard)
            for tensor in state.values():
                name(tensor, "Muon's momentum" if is_muons else "AdamW's moments")
    return held
