"""Megatron's whole training step with Muon inside, of one rank, on a virtual GPU.

Real: Megatron's model, its DDP with buffers and overlaps, DistributedOptimizer, ChainedOptimizer,
clipping, and the package. Not real: forward and backward, which here only read parameters and
write gradients; Transformer Engine's fused kernels (``fused``); and what other ranks say while the
optimizer is built.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_muon
from megatron_muon.config import MuonConfig
from support.virtual_gpu.fused import fused_kernels
from support.virtual_gpu.gpu import Gpu
from support.virtual_gpu.plans import flags_of
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.step import closed, virtual_gpu
from support.virtual_gpu.tensors import CUDA
from support.virtual_gpu.trace import StepStart


@dataclass(frozen=True, slots=True)
class Run:
    """A small GPT.

    Attributes:
        tp, dp: sizes of the groups; the world is their product.
        ep, experts: over how many ranks experts are spread, and how many there are; 0: dense.
        instances: of the distributed optimizer.
        overlap: gradients' reduction and parameters' gather beside compute.
        buckets: of a rank's gradients, with overlap.
        clip: gradients' norm above which they are scaled; 0: never.
        optimizer: ``adam`` is Megatron untouched.
    """

    tp: int = 1
    dp: int = 2
    ep: int = 1
    experts: int = 0
    instances: int = 1
    overlap: bool = True
    layers: int = 2
    hidden: int = 64
    buckets: int = 3
    clip: float = 1.0
    optimizer: str = "muon"

    @property
    def world(self) -> int:
        return self.tp * self.dp

    def words(self) -> list[str]:
        """Megatron-LM's flags."""
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads 4 "
            "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm "
            "--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 256 "
            "--position-embedding-type rope --max-position-embeddings 64 --bf16 "
            f"--tensor-model-parallel-size {self.tp} --world-size {self.world} "
            f"--num-distributed-optimizer-instances {self.instances} --use-distributed-optimizer"
        )
        if self.experts:
            words += f" --num-experts {self.experts} --moe-ffn-hidden-size 48"
            words += f" --expert-model-parallel-size {self.ep} --expert-tensor-parallel-size 1"
        if self.overlap:
            words += " --overlap-grad-reduce --overlap-param-gather"
            words += f" --ddp-num-buckets {self.buckets}"
        return words.split()


def record_megatron(
    run: Run, rank: int, config: MuonConfig | None = None, *, steps: int = 2
) -> Recording:
    """What ``rank`` does in ``steps`` training steps; counts are of the last ``optimizer.step()``.

    The step begins where the gradients are reduced; what comes before it is in the races.
    """
    config = config or MuonConfig()
    with virtual_gpu() as gpu:
        import megatron.core.optimizer  # bound before functions are replaced

        from megatron_muon.dry_run import world
        from megatron_muon.dry_run.model import ranks_of

        assert megatron.core.optimizer is not None
        flags = flags_of(run.words())
        ranks = ranks_of(flags)
        with world.as_rank(rank, ranks), _megatron(gpu):
            chunks, optimizer = _built(run, flags, ranks, config)
            for step in range(steps):
                _train(gpu, run, chunks[0], optimizer, first=step == 0)
            return closed(rank, gpu)


@contextmanager
def _megatron(gpu: Gpu) -> Iterator[None]:
    """What Megatron needs of a machine with a GPU."""
    from megatron.core.tensor_parallel import random

    fork = contextlib.nullcontext
    tracker = type(random.get_cuda_rng_tracker())
    with ExitStack() as stack:
        stack.enter_context(fused_kernels(gpu))
        stack.enter_context(mock.patch.object(tracker, "fork", lambda *a, **k: fork()))
        yield


def _built(run: Run, flags: Any, ranks: Any, config: MuonConfig) -> tuple[list[Any], Any]:
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig

    from megatron_muon.dry_run.chunks import build_chunks
    from megatron_muon.dry_run.model import transformer_config

    transformer = transformer_config(flags, ranks)
    for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
        if hasattr(transformer, name):
            setattr(transformer, name, lambda tensor: tensor)
    transformer.gradient_accumulation_fusion = False
    with torch.device(CUDA):
        chunks = build_chunks(flags, transformer)
    settings = OptimizerConfig(
        optimizer=run.optimizer,
        lr=1e-3,
        bf16=True,
        use_distributed_optimizer=True,
        clip_grad=run.clip,
        weight_decay=0.1,
    )
    if hasattr(settings, "overlap_param_gather"):
        settings.overlap_param_gather = run.overlap
    with _others_agree(ranks), contextlib.redirect_stdout(io.StringIO()):
        megatron_muon.install(config)
        optimizer = megatron_optimizer.get_megatron_optimizer(
            settings, chunks, use_gloo_process_groups=False
        )
    return chunks, optimizer


@contextmanager
def _others_agree(ranks: Any) -> Iterator[None]:
    """While Muon is built, the other ranks say what they would say.

    The host reads 0 from every tensor: no rank has an error, and all agree. Only where ranks must
    say different things is the answer made here.
    """
    from megatron_muon.dry_run import world
    from megatron_muon.mcore import build
    from megatron_muon.runtime import collectives

    def grid(coordinates: Any, *args: Any) -> Any:
        return (world.expert_grid if coordinates.ep_size > 1 else world.dense_grid)(ranks)

    def instance(color: Sequence[int], like: Any, device: Any) -> Any:
        return dist.new_group(_ranks_of_instance(ranks, like, color[-1]))

    with ExitStack() as stack:
        for owner, name, value in (
            (build, "agree_on_grid", grid),
            (build, "survey", lambda *args: []),
            (collectives, "split_world", instance),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _ranks_of_instance(ranks: Any, stage: Any, instance: int) -> list[int]:
    """Those of a stage's ranks that are in one instance of the distributed optimizer."""
    from megatron.core.parallel_state import RankGenerator

    dp = ranks.world // (ranks.tp * ranks.cp * ranks.pp)
    sizes = {"tp": ranks.tp, "ep": 1, "dp": dp, "pp": ranks.pp, "cp": ranks.cp}
    groups = RankGenerator(**sizes, order=ranks.order).get_ranks("dp-cp")
    each = len(groups[0]) // ranks.instances
    inside = {rank for group in groups for rank in sorted(group)[instance * each :][:each]}
    return [rank for rank in dist.get_process_group_ranks(stage) if rank in inside]


@torch.no_grad()
def _train(gpu: Gpu, run: Run, model: Any, optimizer: Any, *, first: bool) -> None:
    trace = gpu.trace
    with trace.named("zero"):
        model.zero_grad_buffer()
        optimizer.zero_grad()
    group_of = model.param_to_bucket_group
    with trace.named("forward"):
        for param in model.parameters():
            if run.overlap and not first:
                group_of[param].finish_param_sync()
            gpu.launch("forward", [param], [])
    with trace.named("backward"):
        for param in reversed(list(model.parameters())):
            gpu.launch("backward", [param], [param.main_grad])
            param.grad_added_to_main_grad = True
            if run.overlap:
                group_of[param].register_grad_ready(param)
        model.finish_grad_sync()
    trace.events.append(StepStart())
    with trace.named("optimizer"):
        optimizer.step()
