"""A record of one logging step: the numbers of each row, from the sums of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_muon.mcore.watching.line_format import FORMAT
from megatron_muon.mcore.watching.rows import SUMS, RecordRow, Table

Record = dict[str, Any]


def start_record(
    table: Table, *, version: str, interval: int, time: float, logit_threshold: float | None
) -> Record:
    """The first line of a run: what is the same in all its steps.

    Args:
        table: the rows.
        version: of this package.
        interval: steps between two lines.
        time: seconds since 1970.
        logit_threshold: of the run's clip of attention logits; None where it has none.
    """
    return {
        "kind": "start",
        "format": FORMAT,
        "version": version,
        "time": round(time, 3),
        "interval": interval,
        "ranks": table.ranks,
        "muon_share": _short(table.muon_share),
        "newton_schulz_planned": _short(table.planned_ratio),
        "logit_threshold": logit_threshold,
        "rows": {
            row.name: {
                "elements": row.elements,
                "matrices": row.matrices,
                "promised_rms": _short(row.promised),
                "full_rank": _short(row.full_rank),
            }
            for row in table.rows
            if row.kind == "muon"
        },
    }


def step_record(
    table: Table,
    totals: Sequence[float],
    maxima: Sequence[float],
    *,
    step: int,
    time: float,
    lr: float | None,
) -> Record:
    """The line of one logging step; a number that is not finite is null.

    Args:
        table: the rows.
        totals: the message, added up over all ranks.
        maxima: the largest logits of all ranks; -inf where an attention did not run.
        step: number of the step.
        time: seconds since 1970.
        lr: of Muon's first group on the rank that writes; None where it has none.
    """
    made: Record = {"kind": "step", "step": step, "time": round(time, 3)}
    if lr is not None:
        made["lr"] = lr
    numbers_of = {"muon": _muon_numbers, "adamw": _adamw_numbers, "layers": _layer_numbers}
    for row in table.rows:
        if row.kind == "logits":
            continue
        start = table.starts[row.kind, row.name]
        names = SUMS[row.kind]
        sums = dict(zip(names, totals[start : start + len(names)], strict=True))
        numbers = numbers_of[row.kind](row, sums)
        if numbers:
            made.setdefault(row.kind, {})[row.name] = {k: _short(v) for k, v in numbers.items()}
    for name, at in table.logits.items():
        if maxima[at] != -math.inf:
            made.setdefault("logits", {})[name] = {"max_logit": _short(maxima[at])}
    times = totals[table.times : table.times + table.ranks]
    slowest = max(range(len(times)), key=times.__getitem__)
    made["newton_schulz_ms"] = {
        "mean": _short(sum(times) / len(times)),
        "max": _short(times[slowest]),
        "rank": slowest,
    }
    return made


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """``(muon_NUMBER/ROW, value)`` of each number; TensorBoard and W&B group them by number."""
    for kind in SUMS:
        for row, numbers in record.get(kind, {}).items():
            for name, value in numbers.items():
                if value is not None:
                    yield f"muon_{name}/{row}", value
    for name, value in record["newton_schulz_ms"].items():
        if value is not None:
            yield f"muon_newton_schulz_ms/{name}", value


def _muon_numbers(row: RecordRow, sums: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a row of matrices; without the directions' where no matrix has a gradient."""
    elements, gradient = sums["elements"], sums["gradient_squares"]
    numbers = {
        "weight_rms": _root(sums["weight_squares"], elements),
        "spectral_norm": _root(sums["spectral_squares"], sums["matrices"]),
        "momentum_norm": _root(sums["momentum_squares"] * row.elements, elements),
        "gradient_norm": _root(gradient * row.elements, elements),
        "moved": _ratio(sums["moved"], sums["matrices"]),
    }
    if not sums["moved"]:
        return numbers
    share = _ratio(sums["moved_elements"], sums["home_elements"])
    products = gradient * sums["update_squares"]
    return {
        "update_rms": _root(sums["update_squares"], elements * share),
        **numbers,
        "orthogonality_error": _root(sums["orthogonality_squares"], sums["moved"]),
        "effective_rank": _ratio(sums["ranks"], sums["moved"]),
        "cosine": _ratio(sums["gradient_updates"], math.sqrt(products) if products >= 0 else 0),
    }


def _adamw_numbers(row: RecordRow, sums: Mapping[str, float]) -> dict[str, float]:
    return {
        "weight_rms": _root(sums["weight_squares"], sums["elements"]),
        "gradient_rms": _root(sums["gradient_squares"], sums["elements"]),
    }


def _layer_numbers(row: RecordRow, sums: Mapping[str, float]) -> dict[str, float]:
    """Empty where no forward pass was seen, as inside a captured graph."""
    if not sums["elements"]:
        return {}
    return {"output_rms": _root(sums["output_squares"], sums["elements"])}


def _ratio(sum_: float, count: float) -> float:
    return sum_ / count if count else math.nan


def _root(squares: float, count: float) -> float:
    mean = _ratio(squares, count)
    return math.sqrt(mean) if mean >= 0 else math.nan


def _short(value: float) -> float | None:
    """Six digits; None where it is not finite, which JSON cannot say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
