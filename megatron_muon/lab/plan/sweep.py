"""The plan of a run at several values of one flag."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.lab.plan.options import DP, SHORT
from megatron_muon.lab.plan.report import aligned, as_dict, assumption_lines, ms
from megatron_muon.lab.plan.rows import TITLES
from megatron_muon.lab.plan.run import RunPlan
from megatron_muon.lab.routes.model_flags import REFUSALS, said

LEFT_OUT, GIVEN = "none", "given"
_MB, _MIB = 1e6, 1 << 20
Planner = Callable[[Sequence[str]], RunPlan]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values to plan with, one after the other.

    Attributes:
        name: a name of ``SHORT``, ``dp``, or a flag without its dashes.
        values: its values; ``none`` leaves the flag out, ``given`` gives one that has no value.
    """

    name: str
    values: tuple[str, ...]

    def words(self, value: str, rank_sizes: int) -> list[str]:
        """The flags that ask for a value, to be added to those of the run.

        Args:
            value: one of ``values``.
            rank_sizes: TP x CP x PP, by which a DP size is multiplied.

        Raises:
            ValueError: ``value`` is not a number where one is needed.
        """
        if value == LEFT_OUT:
            return []
        if self.name == DP:
            if not value.isdecimal() or not int(value):
                raise ValueError(f"--sweep dp: {value!r} is not a number of ranks")
            return ["--world-size", str(int(value) * rank_sizes)]
        flag = f"--{SHORT.get(self.name, self.name)}"
        return [flag] if value == GIVEN else [flag, value]


@dataclass(frozen=True, slots=True)
class Point:
    """A value's plan, or why there is none."""

    value: str
    plan: RunPlan | None
    refused: str = ""


def parsed_sweep(text: str) -> Sweep:
    """``NAME=VALUE,VALUE,...``.

    Raises:
        ValueError: it is not that.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not all(values.split(",")):
        raise ValueError(
            f"--sweep {text}: give NAME=VALUE,VALUE,..., where NAME is dp, {', '.join(SHORT)} or a "
            "flag without its dashes"
        )
    return Sweep(name.removeprefix("--"), tuple(values.split(",")))


def points(sweep: Sweep, plan: Planner, rank_sizes: int) -> Iterator[Point]:
    """Plan the run at each value; one that Megatron or the plugin refuses has a reason.

    Args:
        sweep: the values.
        plan: plans the run with further flags.
        rank_sizes: see ``Sweep.words``.
    """
    for value in sweep.values:
        words = sweep.words(value, rank_sizes)
        try:
            yield Point(value, plan(words))
        except (*REFUSALS, TypeError) as error:
            yield Point(value, None, said(error))


def as_text(sweep: Sweep, made: Sequence[Point]) -> str:
    """A row for each value: the run's own layout in full, the time of every algorithm."""
    planned = [point for point in made if point.plan is not None]
    lines = []
    if planned and planned[0].plan is not None:
        first = planned[0].plan
        names = list(dict.fromkeys(n for p in planned if p.plan for n in p.plan.names))
        header = [sweep.name, "ranks", "busiest / mean", "sent MB", "between nodes", "peak MiB"]
        header += ["share", "slower than AdamW", *(f"{TITLES[name]}, ms" for name in names)]
        rows = [_row(p.value, p.plan, names) for p in planned if p.plan is not None]
        lines += [
            f"slowest pipeline stage, {TITLES[first.layout]}; last columns: the step of each",
            *aligned([header, *rows]),
        ]
    lines += [f"{p.value}: refused: {p.refused}" for p in made if p.plan is None]
    if planned and planned[0].plan is not None:
        lines += ["", "assumptions of the first row:", *assumption_lines(planned[0].plan)]
    return "\n".join(lines)


def as_json_ready(sweep: Sweep, made: Sequence[Point]) -> dict[str, Any]:
    """All figures of every value."""
    return {
        "sweep": sweep.name,
        "points": [
            {"value": point.value, "refused": point.refused}
            if point.plan is None
            else {"value": point.value, **as_dict(point.plan)}
            for point in made
        ],
    }


def _row(value: str, plan: RunPlan, names: Sequence[Any]) -> list[str]:
    slowest = max(plan.kinds, key=lambda kind: kind.row(plan.layout).seconds)
    row = slowest.row(plan.layout)
    uneven = row.flops.most / row.flops.mean if row.flops.mean else 1.0
    return [
        value,
        f"{plan.ranks.world:,}",
        f"{uneven:.2f}",
        f"{(row.inside.mean + row.between.mean) / _MB:,.1f}",
        f"{row.between.mean / _MB:,.1f}",
        f"{(row.peak or 0) / _MIB:,.0f}",
        f"{plan.share(plan.layout):.2%}",
        f"{plan.slower(plan.layout):+.2%}",
        *(ms(plan.seconds(name)) if name in plan.names else "-" for name in names),
    ]
