"""Facts about the rounds of a plan that tests check."""

from __future__ import annotations

from megatron_muon.planning.plan import ExchangePlan


def silent_rounds(plan: ExchangePlan) -> list[bool]:
    """For each round, whether nothing travels in it."""
    round_of = plan.round_of()
    away = [one for one in plan.slices if plan.matrices[one.matrix].home != one.rank]
    travels = {round_of[one.parameter] for one in away}
    return [number not in travels for number in range(len(plan.rounds))]
