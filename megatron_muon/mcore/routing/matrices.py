"""Which matrices a Muon parameter holds, and how TP splits them.

A weight is one matrix unless ``splits`` knows its rows, or it is a batch of legacy
experts.

Megatron's and Transformer Engine's marks ``tensor_model_parallel`` and
``partition_dim`` are right for dense layers only; what they get wrong is decided here.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_muon.mcore.routing.param_routing import (
    Weight,
    expert_name,
    partition_dim_of,
    whole_shape,
)
from megatron_muon.mcore.routing.splits import (
    FusedRows,
    chosen_split,
    fused_of,
    require_own,
    rows_of_ones_own,
    split_of,
)
from megatron_muon.planning.layout import (
    UNPLACED,
    Block,
    Matrices,
    MatrixShape,
    Parameter,
    Span,
    batched_matrices,
    whole_matrix,
)
from megatron_muon.planning.sections import sectioned
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.kinds import own_split
from megatron_muon.settings.rules import MATCHED


def matrices_of(weight: Weight, config: MuonConfig) -> Parameter:
    """The matrices of a 2-D weight, which has no place in a grad buffer yet.

    Raises:
        ValueError, NotImplementedError: its shape is not what its name promises, or
            ``scale_mode`` needs to know outputs from inputs and a batch of experts is
            transposed.
    """
    if weight.is_module("GroupedMLP"):
        return _legacy_experts(weight, config)
    shape = (weight.param.size(0), weight.param.size(1))
    partition_dim = partition_dim_of(weight)
    split = (weight.name, shape, partition_dim, weight.tp_size)
    rows, cols = whole_shape(weight)
    fused = fused_of(weight, rows)
    kind = split_of(weight, config, fused)
    own = own_split(kind)
    if own is not None and own.of == "cols":
        require_own(weight, kind, own, cols)
        return _columns(weight, kind, len(own.sizes))
    if own is not None:
        fused = rows_of_ones_own(weight, kind, own, rows, fused)
    if fused is None or (kind == "whole" and len(fused.sections) == 1):
        matrices = whole_matrix(*split)
    else:
        _require_rows(weight, fused, rows)
        matrices = sectioned(*split, fused.by(kind))
    return _parameter(weight, shape, partition_dim, matrices)


def numbered(matrix: MatrixShape, ep_rank: int, local_experts: int) -> MatrixShape:
    """A matrix of an EP rank's expert, with its number over all EP ranks."""
    name, bracket, number = matrix.name.partition("[expert ")
    if bracket:
        number = str(int(number.rstrip("]")) + ep_rank * local_experts)
        return replace(matrix, name=f"{name}[expert {number}]")
    return replace(matrix, name=expert_name(name, ep_rank, local_experts))


def _columns(weight: Weight, kind: str, count: int) -> Parameter:
    """Equal ranges of columns. Where TP cuts columns, matrices for the ranges of each
    TP rank.
    """
    rows, cols = weight.param.shape
    tp_size = weight.tp_size
    partition_dim = partition_dim_of(weight)
    ranks = tp_size if partition_dim == 1 else 1
    each, rest = divmod(count, ranks)
    if rest:
        raise ValueError(
            f"{weight.name}: {tp_size} TP ranks cannot hold whole ranges of {kind}"
        )
    names = [
        f"{weight.name}[cols {at * each}..{at * each + each - 1}]"
        for at in range(ranks)
    ]
    if ranks == 1:
        matrices = batched_matrices(
            (names[0],), (rows, cols), partition_dim, tp_size, each, apart=True
        )
        return _parameter(weight, (rows, cols), partition_dim, matrices)
    blocks = tuple((Block(rank, Span(0, rows), 0),) for rank in range(ranks))
    made = tuple(MatrixShape(name, rows, cols, each, apart=True) for name in names)
    # none has columns on another rank
    return _parameter(weight, (rows, cols), 0, (made, blocks))


def _legacy_experts(weight: Weight, config: MuonConfig) -> Parameter:
    """Megatron's legacy GroupedMLP: a batch of transposed matrices, whatever the 2-D
    shape says.

    ``weight1`` is ``(experts, hidden, fc1 outputs)`` in memory, ``weight2`` ``(experts,
    fc2 inputs, hidden)`` (GroupedMLP.forward's views). With a gated fc1 the local
    outputs are those of the gate and then of the up half. Rows are inputs: only modes
    of ``MATCHED`` have the same scale for a matrix and its transpose.
    """
    require_scale_mode(weight, config)
    model = weight.model_config
    hidden = model.hidden_size
    experts = model.num_moe_experts // model.expert_model_parallel_size
    numel = weight.param.numel()
    first = weight.name.endswith("weight1")
    cols = numel // (experts * hidden) if first else hidden
    shape = (numel // cols, cols)
    names = tuple(f"{weight.name}[expert {expert}]" for expert in range(experts))
    partition_dim = 1 if first else 0
    halves = 2 if first and model.gated_linear_unit else 1
    kinds = ("whole", "gate-up")[:halves]
    apart = chosen_split(weight, config, "whole", kinds) == "gate-up"
    matrices = batched_matrices(
        names, shape, partition_dim, weight.tp_size, halves, apart=apart
    )
    return _parameter(weight, shape, partition_dim, matrices)


def require_scale_mode(weight: Weight, config: MuonConfig) -> None:
    """Raise NotImplementedError where a weight is stored transposed and the scale
    depends on that.
    """
    if config.scale_mode not in MATCHED and weight.is_module("GroupedMLP"):
        raise NotImplementedError(
            f"{weight.name}: {named('scale_mode')} {config.scale_mode!r} depends on "
            "outputs / inputs, but the legacy GroupedMLP stores its experts "
            f"transposed: use {' or '.join(map(repr, MATCHED))}, experts of another "
            "class (Transformer Engine's, or no --moe-grouped-gemm), or "
            f"{named('muon_exclude')}"
        )


def _parameter(
    weight: Weight,
    shape: tuple[int, int],
    partition_dim: int | None,
    matrices: Matrices,
) -> Parameter:
    return Parameter(
        weight.name, shape, partition_dim, UNPLACED, UNPLACED, 0, *matrices
    )


def _require_rows(weight: Weight, fused: FusedRows, rows: int) -> None:
    """It has the rows that its settings promise, and TP splits no columns of it."""
    tp_size = weight.tp_size
    partition_dim = partition_dim_of(weight)
    if rows != fused.rows:
        raise NotImplementedError(
            f"{weight.name}: {weight.param.size(0)} rows on each of {tp_size} TP ranks "
            f"are not {fused.what}: cannot split it, set split_qkv=False in MuonConfig "
            f"(--muon-no-split-qkv), or {named('splits')} {weight.name}=whole"
        )
    if tp_size > 1 and partition_dim != 0 and not fused.may_be_replicated:
        raise NotImplementedError(
            f"{weight.name}: TP splits it by rows in every model that is known here, "
            f"but its partition_dim is {partition_dim}: put it in "
            f"{named('muon_exclude')} of MuonConfig"
        )
