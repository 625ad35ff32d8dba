"""Which parameters are Muon's and which matrices they hold: the one table, by name and module.

2-D weights are Muon's unless they are an embedding or the output layer; all else is AdamW's. Those
two are known by Megatron's mark ``is_embedding_or_output_parameter``, by the class of their module
or by name; a model of one's own marks what none of these tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.utils import get_model_config

from megatron_muon.config import MuonConfig
from megatron_muon.layout import (
    Block,
    MatrixShape,
    Parameter,
    Span,
    interleaved_rows,
    stacked_halves,
    whole_matrix,
)

Matrices = tuple[tuple[MatrixShape, ...], tuple[tuple[Block, ...], ...]]


def named_parameters(
    model_chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """``(name, parameter)`` of all chunks, without the names of wrapping modules."""
    for index, chunk in enumerate(model_chunks):
        prefix = f"chunk{index}." if len(model_chunks) > 1 else ""
        for name, param in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            yield prefix + name, param


def is_muons(name: str, param: torch.nn.Parameter) -> bool:
    """True for a 2-D weight that is neither an embedding nor the output layer.

    By Megatron's mark, and by name for what it does not mark: a pipeline stage's copy of a tied
    embedding.
    """
    return (
        param.dim() == 2
        and not getattr(param, "is_embedding_or_output_parameter", False)
        and "embedding" not in name
        and "output_layer" not in name
    )


def muon_parameters(
    model_chunks: Sequence[Any], buffers: Sequence[Any], tp_size: int, config: MuonConfig
) -> list[tuple[torch.nn.Parameter, Parameter]]:
    """Every trainable Muon parameter in the buffers, with its place and its matrices.

    Args:
        model_chunks: of this rank.
        buffers: the grad buffers of one DistributedOptimizer.
        tp_size: number of TP ranks.
        config: ``split_qkv`` is read.

    Raises:
        ValueError, NotImplementedError: a fused weight's shape is not what its name promises.
    """
    places = {
        param: (index, Span(start, stop), _bucket_span(buffer.buckets[bucket_id]))
        for index, buffer in enumerate(buffers)
        for param, (start, stop, bucket_id) in buffer.param_index_map.items()
    }
    tables = _embedding_tables(model_chunks)
    found = []
    for name, param in named_parameters(model_chunks):
        if param in places and param not in tables and is_muons(name, param):
            index, span, bucket = places[param]
            partition_dim = _partition_dim(param)
            matrices, blocks = _matrices(
                name, param, tp_size, get_model_config(model_chunks[0]), config
            )
            shape = (param.size(0), param.size(1))
            found.append(
                (
                    param,
                    Parameter(name, shape, partition_dim, bucket, span, index, matrices, blocks),
                )
            )
    return found


def _embedding_tables(model_chunks: Sequence[torch.nn.Module]) -> set[torch.nn.Parameter]:
    """What an embedding module looks up, however the model names it."""
    return {
        param
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, (torch.nn.Embedding, VocabParallelEmbedding))
        for param in module.parameters(recurse=False)
    }


def _matrices(
    name: str, param: torch.nn.Parameter, tp_size: int, model_config: Any, config: MuonConfig
) -> Matrices:
    shape = (param.size(0), param.size(1))
    if name.endswith("self_attention.linear_qkv.weight") and config.split_qkv:
        return _qkv(name, shape, tp_size, model_config)
    if name.endswith("linear_fc1.weight") and model_config.gated_linear_unit:
        return stacked_halves(name, shape, tp_size)
    return whole_matrix(name, shape, _partition_dim(param), tp_size)


def _qkv(name: str, shape: tuple[int, int], tp_size: int, model_config: Any) -> Matrices:
    """Rows repeat per query group: its q heads, its k, its v (Attention.get_query_key_value)."""
    groups = model_config.num_query_groups
    heads_per_group = model_config.num_attention_heads // groups
    head = model_config.kv_channels
    rows = groups * (heads_per_group + 2) * head
    if groups % tp_size or shape[0] * tp_size != rows:
        raise NotImplementedError(
            f"{name}: {shape[0]} rows on each of {tp_size} TP ranks are not the q, k and v of "
            f"{groups} query groups of {heads_per_group} + 2 heads of {head}: cannot split it, "
            "set split_qkv=False in MuonConfig"
        )
    parts = (("q", heads_per_group * head), ("k", head), ("v", head))
    return interleaved_rows(name, shape, tp_size, parts)


def _partition_dim(param: torch.nn.Parameter) -> int | None:
    """The dim that TP splits. Megatron says -1, and a mark, where we say None."""
    if not getattr(param, "tensor_model_parallel", False):
        return None
    partition_dim = int(getattr(param, "partition_dim", -1))
    return partition_dim if partition_dim >= 0 else None


def _bucket_span(bucket: Any) -> Span:
    return Span(bucket.offset, bucket.offset + bucket.grad_data.numel())
