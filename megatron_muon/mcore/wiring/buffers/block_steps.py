"""Muon of the steps between full ones (``full_period``), beside that of the full
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_muon.mcore.host.process_groups import Stage
from megatron_muon.planning.block_steps import block_numerics, block_plans
from megatron_muon.planning.layout import Parameter
from megatron_muon.rules.block_steps import BlockSteps
from megatron_muon.rules.muon import DistributedMuon


def add_block_steps(
    dist_opts: Sequence[Any],
    parameters: Sequence[Sequence[Parameter]],
    stage: Stage,
    muon_of: Callable[..., DistributedMuon],
) -> None:
    """Give each Muon of a stage its block steps. No communication.

    Args:
        dist_opts: the optimizers of a stage that are no stubs; at least one.
        parameters: the Muon parameters of each on all EP ranks.
        stage: of this rank.
        muon_of: makes an optimizer's Muon by a plan (``build``).
    """
    numerics = block_numerics(dist_opts[0].muon.numerics)
    grids = [dist_opt.muon.plan.grid for dist_opt in dist_opts]
    plans = block_plans(parameters, grids, numerics)
    for dist_opt, plan in zip(dist_opts, plans, strict=True):
        full = dist_opt.muon
        block = muon_of(dist_opt, plan, numerics, full.main_params, full.meter, stage)
        full.block_steps = BlockSteps(full, block, full.config.full_period, stage.group)
