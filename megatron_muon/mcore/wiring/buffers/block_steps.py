"""Muon of the steps between full ones (``full_period``), beside that of the full
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_muon.mcore.host.process_groups import Stage
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.planning.block_steps import block_numerics, block_plans
from megatron_muon.planning.layout import Parameter
from megatron_muon.rules.fused import elementwise_on
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.rules.turns import Turns
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.tracing import phases


def add_block_steps(
    muons: Sequence[tuple[Any, DistributedMuon]],
    parameters: Sequence[Sequence[Parameter]],
    stage: Stage,
) -> None:
    """Give each Muon of a stage its turns. No communication.

    Args:
        muons: each optimizer with its Muon.
        parameters: those of each on all EP ranks.
        stage: of this rank.
    """
    if not muons:
        return
    numerics, period = (
        block_numerics(muons[0][1].numerics),
        muons[0][1].config.full_period,
    )
    plans = block_plans(parameters, [muon.plan.grid for _, muon in muons], numerics)
    travels = TORCH_DTYPE[numerics.travels]
    for (part, muon), plan in zip(muons, plans, strict=True):
        own, meter = plan.for_rank(muon.own.rank), muon.meter
        exchange = Exchange(
            own, plan.matrices, stage.group, travels, stage.device, meter
        )
        block = DistributedMuon(
            numerics,
            plan,
            own,
            exchange,
            muon.main_params,
            meter,
            phases(part.config),
            elementwise_on(stage.device, numerics),
        )
        muon.turns = Turns(muon, block, period, stage.group)
