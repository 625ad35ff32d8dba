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
            value = None
        if value is None or not least <= value <= most:
            too_many = value is not None and value > most
            wanted = f"of at most {most}" if too_many else f"of at least {least}"
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, got {text!r}")
        return value

    return number


def finite(text: str) -> float:
    """Any number but infinity and NaN."""
    value = _float(text)
    if value is None or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if value is None or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, got {text!r}")
    return value


def up_to(most: float, least: float = 0.0) -> Callable[[str], float]:
    """A number from ``least`` to ``most``."""

    def number(text: str) -> float:
        value = _float(text)
        if value is None or not least <= value <= most:
            wanted = f"a number from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return number


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
