"""What a topology is predicted to hold and send, by its exchange plan."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron_muon.config import MuonConfig
from megatron_muon.dry_run.kinds import buffers_of, optimizer_of, planned_kinds
from megatron_muon.dry_run.model import ranks_of
from megatron_muon.pricing.memory import MAIN, MOMENTS, MOMENTUM, at_rest
from megatron_muon.pricing.work import held_elements

_STATE = (MAIN, MOMENTS, MOMENTUM)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of all pipeline stages.

    Attributes:
        exchange: bytes that all ranks send in Muon's exchange.
        busiest: bytes of the rank that sends most.
        adamw_state, muon_state: bytes of main parameters and optimizer state on the rank that has
            most, with either optimizer.
    """

    exchange: int
    busiest: int
    adamw_state: int
    muon_state: int


def predicted(flags: Namespace, config: MuonConfig) -> Predicted:
    """Plan every stage; no process group is needed.

    Args:
        flags: flags of the model and its ranks.
        config: Muon's settings.
    """
    ranks = ranks_of(flags)
    exchange = busiest = adamw_state = muon_state = 0
    for kind in planned_kinds([(flags, config)], ranks, "cpu", range(ranks.pp)):
        (parts,) = kind.planned
        optimizers = [optimizer_of(part) for part in parts]
        buffers = [buffers_of(part) for part in parts]
        by_optimizer = (one.plan.sent_bytes() for one in optimizers)
        sent = [sum(each) for each in zip(*by_optimizer, strict=True)]
        held = [held_elements(one.plan) for one in optimizers]
        rest = [one.rest for one in optimizers]
        none = [[0] * len(one) for one in rest]
        every = [
            [mine + others for mine, others in zip(a, b, strict=True)]
            for a, b in zip(held, rest, strict=True)
        ]
        exchange += sum(sent) * len(kind.stages)
        busiest = max(busiest, *sent)
        adamw_state = max(adamw_state, *map(_state, at_rest(buffers, none, every)))
        muon_state = max(muon_state, *map(_state, at_rest(buffers, held, rest)))
    return Predicted(exchange, busiest, adamw_state, muon_state)


def _state(kinds: dict[str, int]) -> int:
    return sum(kinds[kind] for kind in _STATE)
