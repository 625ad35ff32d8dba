"""Why a run's plan is as it is, and what would make its step cheaper.

Every gain is that of a second plan with the change, by the same time model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.plan.report import aligned, ms
from megatron_muon.lab.plan.rows import OURS, TITLES
from megatron_muon.lab.plan.run import RunPlan, StagePlan
from megatron_muon.lab.plan.sweep import Planner
from megatron_muon.lab.pricing.hardware import MICRO
from megatron_muon.lab.pricing.step import NEWTON_SCHULZ
from megatron_muon.lab.routes.model_flags import REFUSALS
from megatron_muon.orthogonalize.numerics import Numerics

_MB, _MIB = 1e6, 1 << 20
_TP, _EP = "--tensor-model-parallel-size", "--expert-model-parallel-size"


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A change of a run's flags.

    Attributes:
        words: the flags that make it, which go behind those of the run.
        effect: what else it changes; empty where weights stay the same but for rounding.
    """

    words: tuple[str, ...]
    effect: str = ""

    @property
    def name(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True)
class Gain:
    """A change, and the plan with it."""

    change: FlagChange
    plan: RunPlan


def changes(plan: RunPlan) -> Iterator[FlagChange]:
    """The changes that are worth a try, without those that the run has already."""
    config, ranks = plan.config, plan.ranks
    other = next(name for name in OURS if name != plan.layout)
    yield FlagChange(("--muon-dp-layout", other), "buckets, and so checkpoints in bucket formats")
    if plan.device == "cuda":
        yield FlagChange(("--products", "kernel"), "quack-kernels must be installed")
    if config.ns_dtype == "bf16":
        yield FlagChange(("--muon-ns-dtype", "fp16"), "another rounding")
    iteration = "standard" if config.ns_iteration != "standard" else "auto"
    yield FlagChange(("--muon-ns-iteration", iteration), "another rounding")
    if Numerics(config, plan.device).split == "off":
        yield FlagChange(("--muon-split-matrices", "auto"), "another rounding")
    homes = "local" if config.homes == "balanced" else "balanced"
    yield FlagChange(("--muon-homes", homes))
    limit = config.round_bytes
    for mib in (512, 2048, 8192) if limit is None else (limit // _MIB * 2, limit // _MIB // 2):
        if mib:
            yield FlagChange(("--muon-round-mib", str(mib)))
    if plan.buckets is not None:
        for number in (plan.buckets // 2, plan.buckets * 2):
            if number:
                yield FlagChange(("--ddp-num-buckets", str(number)), "overlap of reduction")
    for tp in (ranks.tp // 2, ranks.tp * 2):
        if tp:
            yield FlagChange((_TP, str(tp)), "forward and backward, and all that TP changes")
    if ranks.ep > 1:
        for ep in (ranks.ep // 2, ranks.ep * 2):
            yield FlagChange((_EP, str(ep)), "forward and backward, and all that EP changes")


def gains(plan: RunPlan, replan: Planner) -> list[Gain]:
    """The changes that Megatron and the plugin accept, the largest gain first.

    Args:
        plan: of the run.
        replan: plans the run with further flags.
    """
    made = []
    for change in changes(plan):
        try:
            made.append(Gain(change, replan(change.words)))
        except REFUSALS:
            continue  # such as a TP size that does not divide the query groups
    return sorted(made, key=lambda gain: gain.plan.seconds(gain.plan.layout))


def as_text(plan: RunPlan, made: Sequence[Gain]) -> str:
    """Where the time goes, why these homes and buckets, and what each change is predicted to do."""
    kind = _slowest(plan)
    lines = [f"the step of pipeline stage {kind.stages[0]}, {TITLES[plan.layout]}"]
    lines += [f"  {line}" for line in (*_time(plan, kind), *_homes(plan, kind))]
    lines += [f"  {line}" for line in _first_gathers(plan)]
    lines += ["why this number of buckets", *(f"  {note}" for note in plan.notes)]
    lines += ["changes, each planned anew, the fastest first"]
    lines += [f"  {line}" for line in aligned(_table(plan, made))]
    return "\n".join(lines)


def as_json_ready(plan: RunPlan, made: Sequence[Gain]) -> list[dict[str, Any]]:
    """Each change with the seconds of the step before and after."""
    return [
        {
            "change": gain.change.name,
            "also_changes": gain.change.effect,
            "seconds": gain.plan.seconds(gain.plan.layout),
            "gain": _gain(plan, gain),
        }
        for gain in made
    ]


def _slowest(plan: RunPlan) -> StagePlan:
    return max(plan.kinds, key=lambda kind: kind.row(plan.layout).seconds)


def _time(plan: RunPlan, kind: StagePlan) -> Iterator[str]:
    row = kind.row(plan.layout)
    launching = row.launches * plan.hardware.launch_us * MICRO
    yield (
        f"{ms(row.seconds)} ms: the busiest rank orthogonalizes for "
        f"{ms(row.phases[NEWTON_SCHULZ])} ms; a rank waits {ms(row.exposed.mean)} ms on the mean "
        f"and {ms(row.exposed.most)} ms at most, for messages and for ranks with more work; its "
        f"host launches for {ms(launching)} ms"
    )


def _first_gathers(plan: RunPlan) -> Iterator[str]:
    """Of the first stage: others wait for their first micro-batch anyway."""
    kind = plan.kinds[0]
    says = "it starts" if kind.gathers_early else "--muon-early-param-gather auto would start it"
    for one in kind.first_gathers:
        within = (
            f"{says} once {one.after} has updated them, so that {ms(one.least)} ms of it pass "
            f"within the step; {one.early} of {one.buckets} gathers "
            f"({one.early_nbytes / _MB:,.0f} MB) start before its last round then"
        )
        if kind.late_with is not None:
            within = f"with {kind.late_with} this gather starts in the forward pass"
        yield (
            f"not in the step: a forward pass waits for the first {one.nbytes / _MB:,.0f} MB of "
            f"{'experts' if one.experts else 'parameters'}, {ms(one.seconds)} ms on the links; "
            f"{within}"
        )


def _homes(plan: RunPlan, kind: StagePlan) -> Iterator[str]:
    homes = kind.homes
    if plan.config.homes == "balanced":
        yield (
            f"why these homes: {homes.kept:,} of {homes.kept + homes.moved:,} matrices stay on a "
            f"rank that holds most of them; {homes.moved:,} left it, since its work would have "
            "passed 1.05 x the larger of the mean and the largest matrix"
        )
    else:
        yield "why these homes: local ones leave each matrix on a rank that holds most of it"
    yield (
        f"the busiest rank has {homes.busiest_share:.2f} x the mean's work; the largest matrix "
        f"({homes.largest}) alone is {homes.largest_share:.2f} x, so no homes of whole matrices "
        f"could be below {homes.least_share:.2f} x"
    )


def _table(plan: RunPlan, made: Sequence[Gain]) -> list[list[str]]:
    rows = [["change", "step, ms", "gain", "sent, MB", "busiest / mean", "peak, MiB", "but also"]]
    own = Gain(FlagChange(("none",)), plan)
    for gain in (own, *made):
        kind = _slowest(gain.plan)
        row = kind.row(gain.plan.layout)
        rows.append(
            [
                gain.change.name,
                ms(gain.plan.seconds(gain.plan.layout)),
                "" if gain is own else f"{_gain(plan, gain):+.1%}",
                f"{(row.inside.mean + row.between.mean) / _MB:,.1f}",
                f"{kind.homes.busiest_share:.2f}",
                f"{(row.peak or 0) / _MIB:,.0f}",
                gain.change.effect,
            ]
        )
    return rows


def _gain(plan: RunPlan, gain: Gain) -> float:
    """The share of the step that the change saves; negative where it costs."""
    before, after = plan.seconds(plan.layout), gain.plan.seconds(gain.plan.layout)
    return (before - after) / before
