"""Numbers on a command line: kinds for argparse whose errors say what is wanted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

MOST_ELEMENTS = 1 << 40  # in a dim of a weight
MOST_THINGS = 100_000  # that are made one by one, such as layers
MOST_RANKS = 1 << 20  # of a run
MOST_HERE = 1024  # ranks or threads on this machine


def count(least: int = 1, most: int = MOST_ELEMENTS) -> Callable[[str], int]:
    """A whole number from ``least`` to ``most``."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if least <= value <= most:
            return value
        wanted = f"of at most {most}" if value > most else f"of at least {least}"
        raise argparse.ArgumentTypeError(
            f"must be a whole number {wanted}, got {text!r}"
        )

    return number


def finite(text: str) -> float:
    """Any number but infinity and NaN."""
    return _checked(text, math.isfinite, "a finite number")


def positive(text: str) -> float:
    """A finite number above 0."""
    return _checked(text, lambda value: 0 < value < math.inf, "a finite number above 0")


def up_to(most: float, least: float = 0.0) -> Callable[[str], float]:
    """A number from ``least`` to ``most``."""
    wanted = f"a number from {least:g} to {most:g}"
    return lambda text: _checked(text, lambda value: least <= value <= most, wanted)


def _checked(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return value
