"""The numbers of a logging step: those of each row, from the sums of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from megatron_muon.mcore.watching.rows import Table

Numbers = Mapping[str, float]
StepNumbers = dict[str, dict[str, float]]  # by their names and rows


def step_numbers(
    table: Table, totals: Sequence[float], maxima: Sequence[float]
) -> StepNumbers:
    """The numbers of one logging step.

    ``totals`` is the message, added up over all ranks. ``maxima`` are the largest
    logits of all ranks; -inf where an attention did not run.
    """
    found: StepNumbers = {}
    for kind, numbers_of in _NUMBERS.items():
        for row in table.names[kind]:
            numbers = numbers_of(table.sums(totals, kind, row), table, row)
            for name, value in numbers.items():
                found.setdefault(name, {})[row] = value
    for row, largest in zip(table.names["logits"], maxima, strict=True):
        if largest != -math.inf:
            found.setdefault("max_logit", {})[row] = largest
    return found


def scalars(step: StepNumbers) -> dict[str, float]:
    """Each number as ``muon_NUMBER/ROW``; TensorBoard and W&B group them by number."""
    found: dict[str, float] = {}
    for name, rows in step.items():
        found |= {f"muon_{name}/{row}": value for row, value in rows.items()}
    return found


def ranges(step: StepNumbers) -> str:
    """The smallest and the largest row of each number, among those that are finite."""
    texts = []
    for name, rows in step.items():
        finite = [value for value in rows.values() if math.isfinite(value)]
        if finite:
            texts.append(f"{name} {min(finite):.3g} to {max(finite):.3g}")
    return ", ".join(texts)


def _of_muon(sums: Numbers, table: Table, row: str) -> dict[str, float]:
    """The numbers of a row of matrices; without the directions' where no matrix has a
    gradient, or updates are not the directions.
    """
    elements = sums["elements"]
    row_elements = table.about[row]["elements"]
    numbers = {
        "weight_rms": _root(sums["weight_squares"], elements),
        "momentum_norm": _root(sums["momentum_squares"] * row_elements, elements),
        "gradient_norm": _root(sums["gradient_squares"] * row_elements, elements),
        "moved": _ratio(sums["moved"], sums["matrices"]),
    }
    if table.adapts or not sums["moved"]:
        return numbers
    moved_elements = elements * _ratio(sums["moved_elements"], sums["home_elements"])
    lengths = math.sqrt(max(sums["gradient_squares"] * sums["update_squares"], 0.0))
    return {
        "update_rms": _root(sums["update_squares"], moved_elements),
        **numbers,
        "cosine": _ratio(sums["gradient_updates"], lengths),
    }


def _of_adamw(sums: Numbers, *_: object) -> dict[str, float]:
    return {
        "weight_rms": _root(sums["weight_squares"], sums["elements"]),
        "gradient_rms": _root(sums["gradient_squares"], sums["elements"]),
    }


def _of_layer(sums: Numbers, *_: object) -> dict[str, float]:
    """Empty where no forward pass was seen, as inside a captured graph."""
    elements = sums["elements"]
    return {"output_rms": _root(sums["output_squares"], elements)} if elements else {}


_NUMBERS: Mapping[str, Callable[[Numbers, Table, str], dict[str, float]]] = {
    "muon": _of_muon,
    "adamw": _of_adamw,
    "layers": _of_layer,
}


def _ratio(sum_: float, count: float) -> float:
    return sum_ / count if count else math.nan


def _root(squares: float, count: float) -> float:
    mean = _ratio(squares, count)
    return math.sqrt(mean) if mean >= 0 else math.nan
