"""A run planned anew with other flags: the values of a sweep, or changes that may be
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.lab.plan.report import MB, MIB, ms
from megatron_muon.lab.plan.request import Request
from megatron_muon.lab.plan.rows import OURS, TITLES, Name
from megatron_muon.lab.plan.run import RunPlan, plan_run
from megatron_muon.lab.progress import progress
from megatron_muon.lab.routes.model_flags import REFUSALS, said
from megatron_muon.lab.tables import aligned, listed
from megatron_muon.orthogonalize.numerics import Numerics

Outcome = RunPlan | str  # a plan, or why Megatron or the plugin refuses the flags
_ROUNDING = "another rounding"
# Values of a sweep: without the flag, and the flag without a value.
WITHOUT_FLAG, WITHOUT_VALUE = "none", "given"
# Short names of a sweep's flags; any other name is a flag without its dashes.
SHORT = {
    "dp": "dp",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "batch": "global-batch-size",
}

# Options of the command that change no plan.
_OF_OUTPUT = ("json", "assumptions", "explain", "sweep")


@dataclass(frozen=True, slots=True)
class Variant:
    """A run with further flags."""

    name: str  # the value, or the flags
    flags: tuple[str, ...]  # which go behind those of the run
    # what else they change; empty where only the weights' rounding does
    effect: str = ""


def swept(text: str) -> tuple[str, list[Variant]]:
    """The name and the variants of ``NAME=VALUE,VALUE,...``; a ValueError for another
    text.
    """
    name, equals, values = text.partition("=")
    name = name.removeprefix("--")
    if not equals or not name or not all(values.split(",")):
        raise ValueError(
            f"--sweep {text}: give NAME=VALUE,VALUE,..., where NAME is "
            f"{', '.join(SHORT)} or a flag without its dashes"
        )
    if name in _OF_OUTPUT:
        raise ValueError(
            f"--sweep {text}: --{name} says what is printed, not what is planned: give "
            "it beside --sweep, or leave it out"
        )
    flag = f"--{SHORT.get(name, name)}"
    flags = {WITHOUT_FLAG: (), WITHOUT_VALUE: (flag,)}
    return name, [
        Variant(value, flags.get(value, (flag, value))) for value in values.split(",")
    ]


def planned(
    variants: Iterable[Variant], plan: Callable[[tuple[str, ...]], RunPlan]
) -> list[tuple[Variant, Outcome]]:
    """Each variant with its plan, by a function that plans the run with further
    flags.
    """
    outcomes: list[tuple[Variant, Outcome]] = []
    for variant in progress(list(variants), "plans"):
        try:
            outcomes.append((variant, plan(variant.flags)))
        except (*REFUSALS, TypeError) as error:
            outcomes.append((variant, said(error)))
    return outcomes


def accepted(
    outcomes: Iterable[tuple[Variant, Outcome]],
) -> list[tuple[Variant, RunPlan]]:
    """The variants that are not refused."""
    return [(one, plan) for one, plan in outcomes if not isinstance(plan, str)]


def explained(
    request: Request, plan: RunPlan
) -> tuple[list[str], list[dict[str, object]]]:
    """The run's changes of ``changes``, the fastest first: a table, and its figures."""
    # other stages take no longer
    stage = ("--stage", str(plan.slowest.stages[0])) if plan.ranks.pp > 1 else ()
    outcomes = planned(
        changes(plan), lambda flags: plan_run(request.also(*stage, *flags), wanted=())
    )
    plans = sorted(accepted(outcomes), key=lambda each: each[1].step)
    without = (Variant("none", ()), plan)
    lines = table("change, the fastest first", [without, *plans], plan.step)
    figures: list[dict[str, object]] = [
        {
            "change": variant.name,
            "also_changes": variant.effect,
            "seconds": changed.step,
            "gain": (plan.step - changed.step) / plan.step,
        }
        for variant, changed in plans
    ]
    return lines, figures


def table(
    title: str, plans: Sequence[tuple[Variant, RunPlan]], before: float | None = None
) -> list[str]:
    """A row for each variant: its own layout, and the step of every algorithm.

    Or, in place of the latter, the gain over a step of ``before`` seconds.
    """
    names: dict[Name, None] = {}
    if before is None:
        for _, plan in plans:
            names |= dict.fromkeys(plan.names)
    header = ["ranks", "between nodes"] if before is None else ["step, ms", "gain"]
    header += ["slower than AdamW", "busiest / mean", "sent MB", "peak MiB"]
    rows = [[title, *header, *(f"{TITLES[name]}, ms" for name in names)]]
    for variant, plan in plans:
        row = plan.slowest.row(plan.layout)
        if before is None:
            cells = [f"{plan.ranks.world:,}", f"{row.between.mean / MB:,.1f}"]
        else:
            cells = [ms(plan.step), f"{(before - plan.step) / before:+.1%}"]
        cells += [
            f"{plan.slower(plan.layout):+.2%}",
            f"{row.uneven:.2f}",
            f"{(row.inside.mean + row.between.mean) / MB:,.1f}",
            f"{(row.peak or 0) / MIB:,.0f}",
        ]
        for name in names:
            cells.append(ms(plan.seconds(name)) if name in plan.names else "-")
        rows.append([variant.name, *cells])
    lines = aligned(rows)
    effects = [(variant.name, variant.effect) for variant, _ in plans if variant.effect]
    if effects:
        lines += ["", *listed([("change", "changes also"), *effects])]
    return lines


def changes(plan: RunPlan) -> Iterator[Variant]:
    """The changes of a run that are worth a try, without those that it has already."""
    config, ranks = plan.config, plan.ranks
    numerics = Numerics(config, plan.device)

    def change(flag: str, value: object, effect: str = "") -> Variant:
        return Variant(f"{flag} {value}", (flag, str(value)), effect)

    other = next(name for name in OURS if name != plan.layout)
    yield change(
        "--muon-dp-layout", other, "buckets, and so checkpoints in bucket formats"
    )
    if plan.device == "cuda":
        yield change("--products", "kernel", "quack-kernels must be installed")
    if config.preset != "fast":
        yield change("--muon-preset", "fast", _ROUNDING)
    if numerics.dtype == "bf16":
        yield change("--muon-ns-dtype", "fp16", _ROUNDING)
    iteration = "auto" if numerics.iteration == "standard" else "standard"
    yield change("--muon-ns-iteration", iteration, _ROUNDING)
    if numerics.split == "off":
        yield change("--muon-split-matrices", "auto", _ROUNDING)
    yield change("--muon-homes", "local" if config.homes == "balanced" else "balanced")
    sizes = [512, 2048, 8192]
    if config.round_bytes is not None:
        sizes = _doubled_and_halved(config.round_bytes // MIB)
    for mib in sizes:
        yield change("--muon-round-mib", mib)
    for number in _doubled_and_halved(plan.buckets or 0)[::-1]:
        yield change("--ddp-num-buckets", number, "overlap of reduction")
    for what, size in (("tp", ranks.tp), ("ep", ranks.ep)):
        if what == "tp" or size > 1:
            effect = f"forward and backward, and all that {what.upper()} changes"
            for number in _doubled_and_halved(size)[::-1]:
                yield change(f"--{SHORT[what]}", number, effect)


def _doubled_and_halved(size: int) -> list[int]:
    return [number for number in (size * 2, size // 2) if number]
