"""Checks of settings: each raises TypeError or ValueError that names the setting and its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[str, Any], None]  # the setting's name in messages, and its value
# Speeds, factors and thresholds: within these no product of a plan or a step leaves its range.
LEAST, MOST = 1e-9, 1e9


def switch(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def number(name: str, value: Any) -> None:
    """An int or a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def within(interval: str, holds: Callable[[float], bool]) -> Check:
    """A number in an interval, which is written out for the message."""

    def check(name: str, value: Any) -> None:
        number(name, value)
        if not holds(value):
            raise ValueError(f"{name} must be {interval}, got {value}")

    return check


positive = within(f"from {LEAST:g} to {MOST:g}", lambda value: LEAST <= value <= MOST)
multiplier = within(f"from 0 to {MOST:g}", lambda value: 0 <= value <= MOST)


def count(least: int = 1, most: int | None = None) -> Check:
    """A whole number."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")

    return check


def choice(choices: tuple[str, ...]) -> Check:
    """One of some texts."""

    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")

    return check


def either(values: tuple[Any, ...], otherwise: Check) -> Check:
    """One of some values, or what another check accepts."""

    def check(name: str, value: Any) -> None:
        if not any(value is other or value == other for other in values):
            otherwise(name, value)

    return check


def optional(check: Check) -> Check:
    """None, or what a check accepts."""
    return either((None,), check)


def text(name: str, value: Any) -> None:
    """A text, which may be empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {value!r}")


def path(name: str, value: Any) -> None:
    """A path as a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a path as a text, got {value!r}")
    if not value.strip() or "\0" in value:
        raise ValueError(f"{name} must be a path, got {value!r}")


def patterns(name: str, value: Any) -> None:
    """A tuple of texts."""
    if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{name} must be a tuple of patterns, got {value!r}")


def pairs(second: str, check_second: Check) -> Check:
    """A tuple of pairs of a pattern and what ``check_second`` accepts."""

    def check(name: str, value: Any) -> None:
        are_pairs = isinstance(value, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
            for pair in value
        )
        if not are_pairs:
            raise TypeError(f"{name} must be a tuple of (pattern, {second}), got {value!r}")
        for _, other in value:
            check_second(f"{name}: a {second}", other)

    return check
