"""What a plan comes to, in words: the line that a run prints at its start."""

from __future__ import annotations

from math import prod

from megatron_muon.plan import ExchangePlan


def start_line(plan: ExchangePlan, *, stage: int, trainable_elements: int, buckets: int) -> str:
    """One line about a pipeline stage.

    Args:
        plan: the stage's.
        stage: pipeline rank.
        trainable_elements: of one TP rank, Muon's and AdamW's.
        buckets: in the grad buffers of one rank.
    """
    muon_elements = sum(prod(parameter.shape) for parameter in plan.parameters)
    share = muon_elements / max(trainable_elements, 1)
    boundary = plan.boundary_parameters()
    boundary_bytes = sum(prod(parameter.shape) for parameter in boundary) * plan.itemsize
    flops = plan.ns_flops()
    mean = sum(flops) / len(flops)
    return (
        f"[megatron_muon] pipeline stage {stage}: Muon has {len(plan.matrices)} matrices in "
        f"{len(plan.parameters)} parameters ({share:.1%} of the elements), AdamW the rest; "
        f"{buckets} bucket(s), {len(boundary)} boundary parameter(s) ({_amount(boundary_bytes)}B "
        f"per TP rank); the exchange sends {_amount(max(plan.sent_bytes()))}B a step on the "
        f"busiest rank; Newton-Schulz {_amount(sum(flops))}flop a step on the stage, "
        f"{max(flops) / mean if mean else 1:.2f} × the mean on the busiest rank; "
        "optimizer state cannot be saved yet"
    )


def _amount(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000 or unit == "T":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError("unreachable")
