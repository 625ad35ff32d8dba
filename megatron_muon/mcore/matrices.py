"""Which matrices a Muon parameter holds, and how TP splits them: the one table, by module and name.

Megatron's and Transformer Engine's marks ``tensor_model_parallel`` and ``partition_dim`` are right
for dense layers only; what they get wrong is decided here.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_muon.config import MuonConfig
from megatron_muon.layout import (
    Matrices,
    batched_matrices,
    interleaved_rows,
    stacked_halves,
    whole_matrix,
)
from megatron_muon.mcore.weights import Weight

# TP splits the outputs of a first layer and the inputs of a second one.
_EXPERT_PARTITION_DIM = {"linear_fc1": 0, "linear_fc2": 1}


class Holding(NamedTuple):
    """What a parameter holds.

    Attributes:
        shape: local (rows, cols); of a batch of matrices, all their rows.
        partition_dim: that TP splits, None where TP ranks hold replicas.
        matrices: see layout.
    """

    shape: tuple[int, int]
    partition_dim: int | None
    matrices: Matrices


def matrices_of(weight: Weight, tp_size: int, config: MuonConfig) -> Holding:
    """The matrices of a 2-D weight.

    Args:
        weight: Muon's.
        tp_size: number of TP ranks that share it; of an expert, expert-TP ranks.
        config: ``split_qkv`` and ``scale_mode`` are read.

    Raises:
        ValueError, NotImplementedError: its shape is not what its name promises, or ``scale_mode``
            needs to know outputs from inputs and a batch of experts is transposed.
    """
    if weight.is_module("GroupedMLP"):
        _require_spectral(weight, config)
        return _legacy_experts(weight, tp_size)
    shape = (weight.param.size(0), weight.param.size(1))
    partition_dim = partition_dim_of(weight)
    if weight.name.endswith("self_attention.linear_qkv.weight") and config.split_qkv:
        _require_rows(weight, partition_dim, tp_size)
        matrices = _qkv(weight, shape, tp_size)
    elif weight.leaf == "linear_fc1" and weight.model_config.gated_linear_unit:
        _require_rows(weight, partition_dim, tp_size)
        matrices = stacked_halves(weight.name, shape, tp_size)
    else:
        matrices = whole_matrix(weight.name, shape, partition_dim, tp_size)
    return Holding(shape, partition_dim, matrices)


def _legacy_experts(weight: Weight, tp_size: int) -> Holding:
    """Megatron's legacy GroupedMLP: a batch of transposed matrices, whatever the 2-D shape says.

    ``weight1`` is ``(experts, hidden, fc1 outputs)`` in memory, ``weight2`` ``(experts, fc2 inputs,
    hidden)`` (GroupedMLP.forward's views). With a gated fc1 the local outputs are those of the gate
    and then of the up half.
    """
    hidden = weight.model_config.hidden_size
    experts = weight.model_config.num_moe_experts // weight.model_config.expert_model_parallel_size
    numel = weight.param.numel()
    first = weight.name.endswith("weight1")
    cols = numel // (experts * hidden) if first else hidden
    shape = (numel // cols, cols)
    names = tuple(f"{weight.name}[expert {expert}]" for expert in range(experts))
    partition_dim = 1 if first else 0
    halves = 2 if first and weight.model_config.gated_linear_unit else 1
    matrices = batched_matrices(names, shape, partition_dim, tp_size, halves)
    return Holding(shape, partition_dim, matrices)


def _require_spectral(weight: Weight, config: MuonConfig) -> None:
    """Its rows are inputs: only ``spectral`` has the same scale for a matrix and its transpose."""
    if config.scale_mode != "spectral":
        raise NotImplementedError(
            f"{weight.name}: scale_mode {config.scale_mode!r} (--muon-scale-mode) goes by outputs "
            "over inputs, and the legacy GroupedMLP holds its experts transposed: use 'spectral', "
            "experts of another class (Transformer Engine's, or no --moe-grouped-gemm), or put "
            "it in muon_exclude of MuonConfig"
        )


def _qkv(weight: Weight, shape: tuple[int, int], tp_size: int) -> Matrices:
    """Rows repeat per query group: its q heads, their gates if any, its k, its v (Attention)."""
    model = weight.model_config
    groups = model.num_query_groups
    heads_per_group = model.num_attention_heads // groups
    head = model.kv_channels
    gate = bool(getattr(model, "attention_output_gate", False))
    queries = heads_per_group * head
    parts = (("q", queries), *((("gate", queries),) if gate else ()), ("k", head), ("v", head))
    rows = groups * sum(count for _, count in parts)
    if groups % tp_size or shape[0] * tp_size != rows:
        raise NotImplementedError(
            f"{weight.name}: {shape[0]} rows on each of {tp_size} TP ranks are not the "
            f"{', '.join(part for part, _ in parts)} of {groups} query groups of {heads_per_group} "
            f"heads of {head}: cannot split it, set split_qkv=False in MuonConfig"
        )
    return interleaved_rows(weight.name, shape, tp_size, parts)


def _require_rows(weight: Weight, partition_dim: int | None, tp_size: int) -> None:
    if tp_size > 1 and partition_dim != 0:
        raise NotImplementedError(
            f"{weight.name}: TP splits it by rows in every model that is known here, but its "
            f"partition_dim is {partition_dim}: put it in muon_exclude of MuonConfig"
        )


def partition_dim_of(weight: Weight) -> int | None:
    """The dim that TP splits, None where TP ranks hold replicas.

    Transformer Engine marks every Linear as partitioned: also replicated ones (``parallel_mode``
    None with a ``tp_size`` of 1: MLA's down-projections), and experts' second layers on the wrong
    dim. Megatron sets ``parallel_mode`` None on shared experts that overlap, too, which are split.

    Raises:
        NotImplementedError: a 2-D weight of an expert by a name that is not known.
    """
    if weight.is_expert and weight.param.dim() == 2:
        if weight.leaf not in _EXPERT_PARTITION_DIM:
            raise NotImplementedError(
                f"{weight.name}: how expert TP splits it is known of linear_fc1 and linear_fc2 "
                "only: put it in muon_exclude of MuonConfig"
            )
        return _EXPERT_PARTITION_DIM[weight.leaf]
    replicated = getattr(weight.module, "parallel_mode", "marked") in (None, "duplicated")
    if replicated and getattr(weight.module, "tp_size", 1) == 1:
        return None
    if not getattr(weight.param, "tensor_model_parallel", False):
        return None
    partition_dim = int(getattr(weight.param, "partition_dim", -1))
    return partition_dim if partition_dim >= 0 else None  # Megatron says -1 where we say None
