"""A run planned anew with other flags: the values of a sweep, or changes that may be
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_muon.lab.plan.report import MB, MIB, ms
from megatron_muon.lab.plan.rows import OURS, TITLES, Name
from megatron_muon.lab.plan.run import RunPlan
from megatron_muon.lab.pricing.hardware import GIGA
from megatron_muon.lab.progress import progress
from megatron_muon.lab.routes.model_flags import REFUSALS, said
from megatron_muon.lab.tables import aligned, listed
from megatron_muon.orthogonalize.numerics import Numerics

Outcome = RunPlan | str  # a plan, or why Megatron or the plugin refuses the flags
LEFT_OUT, GIVEN = "none", "given"
# Short names of a sweep's flags; any other name is a flag without its dashes.
SHORT = {
    "dp": "dp",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
    "batch": "global-batch-size",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A run with further flags."""

    name: str  # the value, or the flags
    words: tuple[str, ...]  # the flags, which go behind those of the run
    effect: str = (
        ""  # what else they change; empty where weights stay the same but for rounding
    )


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
    flag = f"--{SHORT.get(name, name)}"
    words = {LEFT_OUT: (), GIVEN: (flag,)}
    return name, [
        Variant(value, words.get(value, (flag, value))) for value in values.split(",")
    ]


def planned(
    variants: Iterable[Variant], plan: Callable[[Sequence[str]], RunPlan]
) -> list[tuple[Variant, Outcome]]:
    """Every variant with its plan, by a function that plans the run with further
    flags.
    """
    made: list[tuple[Variant, Outcome]] = []
    for variant in progress(list(variants), "plans"):
        try:
            made.append((variant, plan(variant.words)))
        except (*REFUSALS, TypeError) as error:
            made.append((variant, said(error)))
    return made


def accepted(made: Iterable[tuple[Variant, Outcome]]) -> list[tuple[Variant, RunPlan]]:
    """Those that are not refused."""
    return [(variant, plan) for variant, plan in made if not isinstance(plan, str)]


def table(
    title: str, made: Sequence[tuple[Variant, RunPlan]], before: float | None = None
) -> list[str]:
    """A row for each variant: the run's own layout, and the step of every algorithm.

    Or, in place of the latter, what each gains of the seconds of a step ``before``.
    """
    every: list[Name] = list(
        dict.fromkeys(name for _, plan in made for name in plan.names)
    )
    names = [] if before else every
    header = [title, *(["step, ms", "gain"] if before else ["ranks", "between nodes"])]
    header += ["slower than AdamW", "busiest / mean", "sent MB", "peak MiB"]
    rows = [[*header, *(f"{TITLES[name]}, ms" for name in names)]]
    for variant, plan in made:
        row = plan.slowest.row(plan.layout)
        after = plan.seconds(plan.layout)
        cells = [variant.name, f"{plan.ranks.world:,}", f"{row.between.mean / MB:,.1f}"]
        if before:
            cells[1:] = [ms(after), f"{(before - after) / before:+.1%}"]
        cells += [f"{plan.slower(plan.layout):+.2%}", f"{row.uneven:.2f}"]
        cells += [f"{(row.inside.mean + row.between.mean) / MB:,.1f}"]
        cells += [f"{(row.peak or 0) / MIB:,.0f}"]
        cells += [
            ms(plan.seconds(name)) if name in plan.names else "-" for name in names
        ]
        rows.append(cells)
    effects = [(variant.name, variant.effect) for variant, _ in made if variant.effect]
    effects = [("change", "changes also"), *effects] if effects else []
    return [
        *aligned(rows),
        *([""] if effects else []),
        *(listed(effects) if effects else []),
    ]


def changes(plan: RunPlan) -> Iterator[Variant]:
    """The changes of a run that are worth a try, without those that it has already."""
    config, ranks = plan.config, plan.ranks

    def change(flag: str, value: object, effect: str = "") -> Variant:
        return Variant(f"{flag} {value}", (flag, str(value)), effect)

    other = next(name for name in OURS if name != plan.layout)
    yield change(
        "--muon-dp-layout", other, "buckets, and so checkpoints in bucket formats"
    )
    if plan.device == "cuda":
        yield change("--products", "kernel", "quack-kernels must be installed")
    if config.ns_dtype == "bf16":
        yield change("--muon-ns-dtype", "fp16", "another rounding")
    iteration = "standard" if config.ns_iteration != "standard" else "auto"
    yield change("--muon-ns-iteration", iteration, "another rounding")
    if Numerics(config, plan.device).split == "off":
        yield change("--muon-split-matrices", "auto", "another rounding")
    yield change("--muon-homes", "local" if config.homes != "local" else "balanced")
    if config.link_gbytes is None:
        link = (
            plan.hardware.network_link
            if plan.slowest.row(plan.layout).between.most
            else 0.0
        )
        yield change(
            "--muon-link-gbytes", f"{(link or plan.hardware.node_link) / GIGA:.4g}"
        )
    limit = config.round_bytes
    for mib in (
        (512, 2048, 8192) if limit is None else (limit // MIB * 2, limit // MIB // 2)
    ):
        if mib:
            yield change("--muon-round-mib", mib)
    if plan.buckets is not None:
        for number in _halved_and_doubled(plan.buckets):
            yield change("--ddp-num-buckets", number, "overlap of reduction")
    for what, size in (("tp", ranks.tp), ("ep", ranks.ep)):
        if what == "tp" or size > 1:
            for number in _halved_and_doubled(size):
                effect = f"forward and backward, and all that {what.upper()} changes"
                yield change(f"--{SHORT[what]}", number, effect)


def _halved_and_doubled(size: int) -> list[int]:
    return [number for number in (size // 2, size * 2) if number]
