"""Sentences of ``megatron-muon routes`` about a run's patterns and pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.describe import PREFIX, amount, iteration_text
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.settings.patterns import pairs_of
from megatron_muon.settings.rules import own_rule


def pattern_lines(numerics: Numerics) -> list[str]:
    """A line for each pattern that has settings of its own; with its iteration where
    that is not the run's.
    """
    lines = []
    for pattern, settings in pairs_of(numerics.config.by_pattern):
        line = f"{PREFIX} {pattern}:{settings}"
        own = numerics.where(settings)
        if own.iteration != numerics.iteration:
            line += f"; iteration {iteration_text(own)}"
        lines.append(line)
    return lines


def optimizer_text(
    plan: ExchangePlan,
    *,
    experts: bool,
    buckets: Sequence[int],
    earlier: Sequence[ExchangePlan] = (),
    rule: str = "muon",
) -> str:
    """Sentences about the Muon part of one DistributedOptimizer of a pipeline stage.

    Args:
        plan: the plan of that optimizer.
        experts: whether it is the experts' optimizer.
        buckets: number of buckets in each grad buffer of a rank.
        earlier: plans of the stage's optimizers before it. Homes balance the work of
            all of them together, so the busiest rank is that of the sum.
        rule: the run's. Homes are chosen by Newton-Schulz's flops, also where a rule of
            one's own stands in its place.
    """
    flops = plan.ns_flops()
    together = [
        sum(each)
        for each in zip(flops, *(one.ns_flops() for one in earlier), strict=True)
    ]
    mean = sum(together) / len(together)
    sent = plan.sent_bytes()
    work = f"Newton-Schulz: {amount(sum(flops), 'flop')} a step on the stage, "
    if own_rule(rule) is not None:
        work = "Work, as if it were Newton-Schulz's: "
    busiest = max(together) / mean if mean else 1
    shared = f" ({len(plan.shared)} shared by several ranks)" if plan.shared else ""
    how = "One rank gathers each matrix, orthogonalizes it and sends it back. "
    return (
        f"{'Experts: ' if experts else ''}{len(plan.matrices)} matrices{shared} in "
        f"{len(plan.parameters)} weights, {len(plan.boundary_parameters())} of them "
        f"cut by the shards of {sum(buckets)} gradient bucket(s). "
        f"{'' if earlier else how}A rank sends {amount(sum(sent) / len(sent), 'B')} a "
        f"step (the busiest {amount(max(sent), 'B')}) in {len(plan.rounds)} round(s). "
        f"{work}{busiest:.2f} × the mean on the busiest rank"
        f"{', with the matrices above' if earlier else ''}"
    )
