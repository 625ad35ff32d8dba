"""Plans of the steps between full ones: each TP rank's slice of a matrix is a matrix of
its own.

Block-periodic orthogonalization (arXiv 2510.16981): no gather over TP, and less work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import SLICE_OF, Block, MatrixShape, Parameter, Span
from megatron_muon.planning.plan import ExchangePlan, flops_of, make_plan
from megatron_muon.settings.patterns import with_factor


def block_numerics(numerics: Numerics) -> Numerics:
    """The numerics of a block step. ``block_lr_mult`` goes into the factor of a
    direction, and so not into the weight decay.
    """
    config = numerics.config
    rms = config.matched_adamw_rms * config.block_lr_mult
    by_pattern = with_factor(config.by_pattern, "rms", config.block_lr_mult)
    of_block = replace(config, matched_adamw_rms=rms, by_pattern=by_pattern)
    return Numerics(of_block, numerics.device)


def block_plans(
    parameters: Sequence[Sequence[Parameter]],
    grids: Sequence[RankGrid],
    numerics: Numerics,
) -> list[ExchangePlan]:
    """The plans of a stage's optimizers in a block step.

    Args:
        parameters: the Muon parameters of each, in the order of their steps.
        grids: the ranks of each.
        numerics: those of block steps.
    """
    sliced = [list(map(in_tp_slices, each)) for each in parameters]
    works = [flops_of(each, numerics) for each in sliced]
    plans: list[ExchangePlan] = []
    for at, (each, grid) in enumerate(zip(sliced, grids, strict=True)):
        plans.append(make_plan(each, grid, numerics, plans, sum(works[at + 1 :])))
    return plans


def in_tp_slices(parameter: Parameter) -> Parameter:
    """The parameter with a matrix for what each TP rank has of one; itself where TP
    cuts none.
    """
    if parameter.partition_dim is None or len(parameter.blocks) == 1:
        return parameter
    matrices: list[MatrixShape] = []
    blocks: list[tuple[Block, ...]] = []
    for tp_rank, of_rank in enumerate(parameter.blocks):
        rows: dict[
            int, list[Span]
        ] = {}  # of each matrix here, in the order of their elements
        for block in sorted(of_rank, key=lambda block: block.rows):
            rows.setdefault(block.matrix, []).append(block.rows)
        own: list[Block] = []
        for index, spans in rows.items():
            count = 0
            for span in spans:
                own.append(Block(len(matrices), span, count))
                count += span.size
            whole = parameter.matrices[index]
            name = f"{whole.name}{SLICE_OF}{tp_rank}]"
            matrices.append(
                replace(whole, name=name, rows=count, cols=parameter.shape[1])
            )
        blocks.append(tuple(own))
    # none of these has columns on another rank
    return replace(
        parameter, partition_dim=0, matrices=tuple(matrices), blocks=tuple(blocks)
    )
