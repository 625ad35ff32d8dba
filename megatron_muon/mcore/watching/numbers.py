"""The numbers of a logging step: those of each row, from the sums of all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from megatron_muon.mcore.watching.rows import Table

Numbers = Mapping[str, float]
StepNumbers = dict[str, dict[str, dict[str, float]]]  # of each row, by its kind


def step_numbers(
    table: Table, totals: Sequence[float], maxima: Sequence[float]
) -> StepNumbers:
    """The numbers of one logging step; a kind without a row is left out.

    ``totals`` is the message, added up over all ranks. ``maxima`` are the largest
    logits of all ranks; -inf where an attention did not run.
    """
    found: StepNumbers = {}
    for kind, numbers_of in _NUMBERS.items():
        for row in table.names[kind]:
            numbers = numbers_of(table.sums(totals, kind, row), table, row)
            if numbers:
                found.setdefault(kind, {})[row] = numbers
    for row, largest in zip(table.names["logits"], maxima, strict=True):
        if largest != -math.inf:
            found.setdefault("logits", {})[row] = {"max_logit": largest}
    return found


def scalars(step: StepNumbers) -> dict[str, float]:
    """Each number as ``muon_NUMBER/ROW``; TensorBoard and W&B group them by number."""
    found: dict[str, float] = {}
    for rows in step.values():
        for row, numbers in rows.items():
            found |= {f"muon_{name}/{row}": value for name, value in numbers.items()}
    return found


def ranges(step: StepNumbers) -> str:
    """The smallest and the largest row of each number, among those that are finite."""
    values: dict[str, list[float]] = defaultdict(list)
    for rows in step.values():
        for numbers in rows.values():
            for name, value in numbers.items():
                if math.isfinite(value):
                    values[name].append(value)
    return ", ".join(
        f"{name} {min(found):.3g} to {max(found):.3g}" for name, found in values.items()
    )


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
