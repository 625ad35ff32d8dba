"""The part of a comparison's report about slow links: measured, and by a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_muon.lab.compare.advantage import (
    LEADS,
    Advantage,
    Change,
    Timed,
    by_model,
    measured,
    modelled,
)
from megatron_muon.lab.compare.compared import Compared, OverLinks, table
from megatron_muon.lab.compare.links import BURST_SECONDS, LEAST_BURST

_MODEL = (
    "The model takes a step as measured without slow links, and adds a mean rank's bytes of "
    "gradients, parameters and exchange over the bandwidth of its link, nothing overlapped. Bytes "
    "of tensor and pipeline parallelism, which both optimizers send, are not in it, and gloo sends "
    "a reduce-scatter's bytes twice."
)
_ENDS = (
    "Muon's advantage in time to a loss ends below these Mbit/s, if Muon leads by the ratio in "
    "the head of the column. *begins* stands where Muon is ahead below them."
)


def as_json(each: Compared) -> dict[str, Any]:
    """Steps at every rate, measured and by the model, and the ends of Muon's advantage."""
    return {
        "steps": [_steps(each, at) for at in each.links],
        "measured": [_plain(one) for one in _measured(each)] if each.links else None,
        "model": [_plain(one) for one in _modelled(each)],
    }


def as_markdown(compared: Sequence[Compared], why_not: str | None) -> list[str]:
    """Paragraphs and tables.

    Args:
        compared: in the order of the topologies.
        why_not: why nothing was measured; None where it was.
    """
    modelled_ends = table(
        ["topology", *(f"{lead:g}" for lead in LEADS)],
        [[str(each.topology), *map(_text, _modelled(each))] for each in compared],
    )
    if why_not is not None:
        said = f"A model, not a measurement: {why_not}. {_MODEL} {_ENDS}"
        return [f"## Slow links\n\n{said}", modelled_ends]
    return [
        "## Slow links\n\nMeasured: each rank in a network namespace of its own, joined by a "
        f"bridge; tc's token bucket holds what it sends to the rate, but for a burst of "
        f"{1e3 * BURST_SECONDS:g} ms or {LEAST_BURST / 1024:g} KiB. *MB* is what left by the link "
        f"of the busiest rank in a step, all of it. {_MODEL}",
        steps_table(compared),
        f"{_ENDS} In brackets are the measured rates on either side, with a straight line of "
        "times over 1 / rate between them; *none* is no limit but the machine's. Several changes "
        "of one topology show that noise decides there.",
        _ends_table(compared),
    ]


def steps_table(compared: Sequence[Compared]) -> str:
    """A row for each topology and rate."""
    head = ["topology", "Mbit/s", "AdamW, ms", "model", "MB", "Muon, ms", "model", "MB"]
    rows = []
    for each in compared:
        for at in each.links:
            model = _model(each, at.mbits)
            rows.append(
                [
                    str(each.topology),
                    f"{at.mbits:g}",
                    *(f"{at.adamw.step_ms:.0f}", f"{model.adamw_ms:.0f}", _mb(at.adamw.link_bytes)),
                    *(f"{at.muon.step_ms:.0f}", f"{model.muon_ms:.0f}", _mb(at.muon.link_bytes)),
                    f"{_ratio(at.timed):.2f}",
                    f"{_ratio(model):.2f}",
                ]
            )
    return table([*head, "ratio", "model"], rows)


def _ends_table(compared: Sequence[Compared]) -> str:
    head = [name for lead in LEADS for name in (f"{lead:g}", "model")]
    rows = []
    for each in compared:
        both = zip(_measured(each), _modelled(each), strict=True)
        rows.append([str(each.topology), *(_text(one) for pair in both for one in pair)])
    return table(["topology", *head], rows)


def _steps(each: Compared, at: OverLinks) -> dict[str, Any]:
    model = _model(each, at.mbits)
    return {
        "mbits": at.mbits,
        "adamw": asdict(at.adamw),
        "muon": asdict(at.muon),
        "ratio": _ratio(at.timed),
        "model": {
            "adamw_ms": model.adamw_ms,
            "muon_ms": model.muon_ms,
            "ratio": _ratio(model),
        },
    }


def _measured(each: Compared) -> list[Advantage]:
    free = Timed(math.inf, each.adamw.step_ms, each.muon.step_ms)
    points = [free, *(at.timed for at in each.links)]
    return [measured(points, lead) for lead in LEADS]


def _modelled(each: Compared) -> list[Advantage]:
    return [by_model(each.adamw, each.muon, each.topology.world, lead) for lead in LEADS]


def _model(each: Compared, mbits: float) -> Timed:
    return modelled(each.adamw, each.muon, each.topology.world, mbits)


def _ratio(timed: Timed) -> float:
    return timed.muon_ms / timed.adamw_ms


def _text(advantage: Advantage) -> str:
    if not advantage.changes:
        return f"{'Muon' if advantage.ahead else 'AdamW'} at every rate"
    return ", then ".join(map(_change_text, advantage.changes))


def _change_text(change: Change) -> str:
    word = "" if change.ends else "begins "
    if change.between is None:
        return f"{word}{change.mbits:.3g}"
    slow, fast = change.between
    return f"{word}{change.mbits:.3g} ({slow:g} to {'none' if math.isinf(fast) else f'{fast:g}'})"


def _plain(advantage: Advantage) -> dict[str, Any]:
    """For JSON, which has no infinity: null stands for a rate without limit."""
    return {
        "lead": advantage.lead,
        "ahead_without_limit": advantage.ahead,
        "changes": [
            {
                "mbits": _finite(change.mbits),
                "ends": change.ends,
                "between": change.between and [_finite(rate) for rate in change.between],
            }
            for change in advantage.changes
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"
