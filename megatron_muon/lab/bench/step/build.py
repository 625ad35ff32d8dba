"""Building the model and the optimizer of a row on a rank."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

import megatron_muon
from megatron_muon.lab.bench.step.rows import OPTIONS, Row, bucket_elements
from megatron_muon.lab.bench.step.upstream import (
    layouts,
    lays_out_buffers,
    upstream_optimizer,
)


@dataclass(frozen=True, slots=True)
class Built:
    """A row's model (chunks in Megatron's DDP) and its optimizer."""

    chunks: list[Any]
    optimizer: Any


def build(row: Row, flags: Namespace, timers: Any) -> Built:
    """Build a row on this rank; every rank calls it, after Megatron's groups are
    made.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_muon.lab.dry_run.chunks import build_chunks, transformer_config
    from megatron_muon.lab.dry_run.model import ranks_of

    own = Namespace(**vars(flags))
    own.overlap_grad_reduce = row.buckets
    if row.buckets and own.ddp_bucket_size is None and own.ddp_num_buckets is None:
        own.ddp_bucket_size = bucket_elements(own)
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(own, ranks_of(own))
    device = torch.device(torch.cuda.current_device())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        if row.kind == "muon":
            stack.callback(megatron_muon.uninstall)
            megatron_muon.install(row.config)
        wrapping: dict[str, Any] = {}
        if row.kind == "upstream":
            old = {"distributed_optimizer": False}
            wrapping = {"layouts": layouts} if lays_out_buffers() else old
        chunks = build_chunks(own, config, device=device, **wrapping)
        return Built(chunks, _optimizer(row, chunks, timers))


def _optimizer(row: Row, chunks: list[Any], timers: Any) -> Any:
    import megatron.core.optimizer as core

    if row.kind == "upstream":
        return upstream_optimizer(row, chunks, timers)
    config = core.OptimizerConfig(
        optimizer="adam" if row.kind == "adamw" else "muon",
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        **OPTIONS,
    )
    config.timers = timers
    return core.get_megatron_optimizer(config, chunks)
