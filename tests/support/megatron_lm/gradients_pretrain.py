"""``pretrain_gpt.py`` from weights that no layout changes; it writes down its first
gradients.

Run by the launcher, with the checkout on PYTHONPATH and a folder in RECORD. Each rank
of the first data-parallel one writes its part of every gradient and the dimension that
tensor parallelism cuts.
"""

from __future__ import annotations

import os
import runpy
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.optimizer.optimizer as optimizers
import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core import parallel_state

LAYERS = "decoder.layers."
chunks: list[Any] = []
made = training.get_model
original = optimizers.ChainedOptimizer.step


def parameters() -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Those of this rank's chunks, by the names that they have in one process."""
    for chunk in chunks:
        model = chunk.module
        for name, param in model.named_parameters():
            before, layers, after = name.partition(LAYERS)
            if layers:
                number, _, after = after.partition(".")
                layer = model.get_submodule(f"{before}{layers}{number}")
                after = f"{layer.layer_number}.{after}"
            yield f"{before}{layers}{after}", param


def cut_dim(param: torch.nn.Parameter) -> int | None:
    return (
        param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    )


def get_model(*args: Any, **kwargs: Any) -> Any:
    chunks[:] = made(*args, **kwargs)
    fill()
    return list(chunks)


@torch.no_grad()
def fill() -> None:
    """Give each matrix weights that follow from its name."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, param in parameters():
        if param.ndim == 2:
            dim = cut_dim(param)
            shape = list(param.shape)
            shape[dim or 0] *= 1 if dim is None else ranks
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = 0.02 * torch.randn(shape, generator=generator)
            param.copy_(whole if dim is None else whole.chunk(ranks, dim)[rank])


def gather() -> None:
    """Give each rank the reduced gradients of its data-parallel peers' shards."""
    for chunk in chunks:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def step(self: Any) -> Any:
    gather()
    if parallel_state.get_data_parallel_rank() == 0:
        parts = {name: (p.main_grad.clone(), cut_dim(p)) for name, p in parameters()}
        torch.save(parts, Path(os.environ["RECORD"], f"{dist.get_rank():03}.pt"))
    return original(self)


training.get_model = get_model
optimizers.ChainedOptimizer.step = step
checkout = Path(str(training.__file__)).parents[2]
runpy.run_path(str(checkout / "pretrain_gpt.py"), run_name="__main__")
