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
    local_shape,
    partition_dim_of,
    whole_shape,
)
from megatron_muon.mcore.routing.splits import (
    FusedRows,
    chosen_split,
    fused_of,
    own_sections,
    require_own,
    split_of,
)
from megatron_muon.planning.layout import UNPLACED, Matrix, Parameter
from megatron_muon.planning.sections import Rows, Sections, sectioned
from megatron_muon.settings.config import MuonConfig, named
from megatron_muon.settings.kinds import OwnSplit, own_split
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
    rows, _ = whole_shape(weight)
    fused = fused_of(weight, rows)
    kind = split_of(weight, config, fused)
    own = own_split(kind)
    if own is not None:
        require_own(weight, kind, own)
        if own.of == "cols":
            return _columns(weight, kind, own)
        sections = own_sections(own, rows, fused)
    elif fused is None or (kind == "whole" and len(fused.sizes) == 1):
        sections = ((Rows("", rows),),)
    else:
        _require_rows(weight, fused, rows)
        whole = tuple((Rows("", size),) for size in fused.sizes)
        sections = fused.splits.get(kind, whole)
    return _parameter(weight, local_shape(weight), partition_dim_of(weight), sections)


def numbered(matrix: Matrix, ep_rank: int, local_experts: int) -> Matrix:
    """A matrix of an EP rank's expert, with its number over all EP ranks."""
    name, bracket, number = matrix.name.partition("[expert ")
    if bracket:
        number = str(int(number.rstrip("]")) + ep_rank * local_experts)
        return replace(matrix, name=f"{name}[expert {number}]")
    return replace(matrix, name=expert_name(name, ep_rank, local_experts))


def _columns(weight: Weight, kind: str, own: OwnSplit) -> Parameter:
    """Equal ranges of columns. Where TP cuts columns, matrices for the ranges of each
    TP rank.
    """
    tp_size = weight.tp_size
    partition_dim = partition_dim_of(weight)
    ranks = tp_size if partition_dim == 1 else 1
    count = len(own.sizes)
    each, rest = divmod(count, ranks)
    if rest:
        raise ValueError(
            f"{weight.name}: {tp_size} TP ranks cannot hold whole ranges of {kind}"
        )
    rows, _ = whole_shape(weight)
    firsts = range(0, count, each)
    runs = tuple(Rows(f"cols {at}..{at + each - 1}", rows) for at in firsts)
    if ranks > 1:  # each rank has all rows of its matrices, and no other has any
        partition_dim = 0
    shape = local_shape(weight)
    return _parameter(weight, shape, partition_dim, (runs,), each, apart=True)


def _legacy_experts(weight: Weight, config: MuonConfig) -> Parameter:
    """Megatron's legacy GroupedMLP: a batch of transposed matrices, whatever the 2-D
    shape says.

    ``weight1`` is ``(experts, hidden, fc1 outputs)`` in memory, ``weight2`` ``(experts,
    fc2 inputs, hidden)`` (GroupedMLP.forward's views). With a gated fc1 the local
    outputs are those of the gate and then of the up half. Rows are inputs: only modes
    of ``MATCHED`` have the same scale for a matrix and its transpose.
    """
    require_scale_mode(weight, config)
    local_rows, cols = local_shape(weight)
    shape = (weight.param.numel() // cols, cols)
    experts = range(shape[0] // local_rows)
    rows, _ = whole_shape(weight)
    sections = tuple((Rows(f"expert {expert}", rows),) for expert in experts)
    partition_dim = partition_dim_of(weight)
    is_gated = partition_dim == 1 and weight.model_config.gated_linear_unit
    kinds = ("whole", "gate-up") if is_gated else ("whole",)
    apart = chosen_split(weight, config, kinds) == "gate-up"
    halves = 2 if is_gated else 1
    return _parameter(weight, shape, partition_dim, sections, halves, apart=apart)


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
    sections: Sections,
    column_blocks: int = 1,
    *,
    apart: bool = False,
) -> Parameter:
    """``shape`` is the local one; for the other arguments see ``sectioned`` and
    ``Matrix``.
    """
    matrices, blocks = sectioned(
        weight.name, shape, partition_dim, weight.tp_size, sections
    )
    in_ranges = tuple(
        replace(matrix, column_blocks=column_blocks, apart=apart) for matrix in matrices
    )
    return Parameter(
        weight.name, shape, partition_dim, UNPLACED, UNPLACED, 0, in_ranges, blocks
    )


def _require_rows(weight: Weight, fused: FusedRows, rows: int) -> None:
    """It has the rows that its settings promise, and TP splits no columns of it."""
    tp_size = weight.tp_size
    partition_dim = partition_dim_of(weight)
    if rows != sum(fused.sizes):
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
