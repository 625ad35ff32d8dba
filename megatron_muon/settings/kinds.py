"""Kinds of settings: how a value is written on a command line, what it means, what is
refused.

A check raises TypeError or ValueError that names the setting and the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Check = Callable[[str, Any], None]  # the setting's name in messages, and its value
# Speeds, factors and thresholds: within these no product of a plan or a step leaves its
# range.
LEAST, MOST = 1e-9, 1e9


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of setting, and of its flag."""

    check: Check  # raises for a value that the setting cannot have
    type: Callable[[str], Any] = str  # makes the flag's value of a text
    # the values that the flag takes; empty: any of its type
    choices: tuple[str, ...] = ()
    metavar: str | None = None  # what --help calls the value
    # argparse's
    action: Literal["store", "store_true", "store_false", "append"] = "store"
    # the setting that a value of the flag means; None: none
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same  # the value of the flag that means a setting

    def or_none(self) -> Kind:
        """The same, or None, which leaves the choice to the run or turns a feature
        off.
        """
        return replace(self, check=_either((None,), self.check))

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of ``add_argument``."""
        if self.action.startswith("store_"):
            return {"action": self.action}
        return {
            "action": self.action,
            "type": self.type,
            "choices": self.choices or None,
            "metavar": self.metavar,
        }


def _of_type(what: str, *types: type) -> Check:
    """A check for one of some types; a bool does not pass as an int."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, types) or (type(value) is bool and bool not in types):
            raise TypeError(f"{name} must be {what}, got {value!r}")

    return check


_switch = _of_type("True or False", bool)
_number = _of_type("a number", int, float)
_int = _of_type("an int", int)


def _must_be(
    what: str, holds: Callable[[Any], bool], first: Check | None = None
) -> Check:
    """A check that something holds of a value, after another check."""

    def check(name: str, value: Any) -> None:
        if first is not None:
            first(name, value)
        if not holds(value):
            raise ValueError(f"{name} must be {what}, got {value!r}")

    return check


def _count(least: int, most: int | None = None) -> Check:
    check = _must_be(f"at least {least}", lambda value: value >= least, _int)
    if most is None:
        return check
    return _must_be(f"at most {most}", lambda value: value <= most, check)


def _one_of(choices: tuple[str, ...]) -> Check:
    return _must_be(f"one of {', '.join(choices)}", lambda value: value in choices)


def _either(values: tuple[Any, ...], otherwise: Check) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in values:
            otherwise(name, value)

    return check


def _patterns(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(
        isinstance(pattern, str) for pattern in value
    ):
        like = f", as {(value,)!r}" if isinstance(value, str) else ""
        raise TypeError(f"{name} must be a tuple of patterns{like}, got {value!r}")


SWITCH = Kind(_switch, action="store_true")
FALSE_SWITCH = Kind(_switch, action="store_false")
OFF_SWITCH = Kind(
    _switch, action="store_true", read=lambda v: not v, write=lambda v: not v
)
PATTERNS = Kind(_patterns, action="append", metavar="PATTERN", read=tuple, write=list)


def number(interval: str, holds: Callable[[float], bool]) -> Kind:
    """A number in an interval, which is written out for the message."""
    return Kind(_must_be(interval, holds, _number), type=float)


POSITIVE = number(f"from {LEAST:g} to {MOST:g}", lambda v: LEAST <= v <= MOST)
MULTIPLIER = number(f"from 0 to {MOST:g}", lambda v: 0 <= v <= MOST)


def count(metavar: str | None = None, most: int | None = None) -> Kind:
    """A whole number from 1."""
    return Kind(_count(1, most), type=int, metavar=metavar)


def choice(choices: tuple[str, ...]) -> Kind:
    """One of some texts."""
    return Kind(_one_of(choices), choices=choices)


def choice_or_auto(choices: tuple[str, ...]) -> Kind:
    """One of some texts, or None, which the flag calls ``auto``."""
    return Kind(
        _either((None,), _one_of(choices)),
        choices=("auto", *choices),
        read=lambda value: None if value == "auto" else value,
        write=lambda value: value or "auto",
    )


def count_or_zero(metavar: str | None = None, unit: int = 1, word: str = "") -> Kind:
    """A whole number from 1, or None, which is 0 on a command line, or a word.

    The flag counts units, the setting ones.
    """

    def number(text: str) -> int:
        return 0 if text == word else int(text)

    def read(value: int) -> int | None:
        if value < 0:
            raise ValueError(f"must be at least 1, or 0 for the default, got {value}")
        return value * unit or None

    return Kind(
        _either((None,), _count(1)),
        type=number if word else int,
        metavar=metavar,
        read=read,
        write=lambda value: (value or 0) // unit,
    )


def count_or_words(words: tuple[str, ...], metavar: str, least: int, most: int) -> Kind:
    """A whole number, one of some words, or None."""

    def number(text: str) -> int | str:
        return text if text in words else int(text)

    return Kind(
        _either((None, *words), _count(least, most)), type=number, metavar=metavar
    )


def pairs(second: str, of_second: Kind) -> Kind:
    """A tuple of pairs of a pattern and another value; ``PATTERN=VALUE`` on a command
    line.
    """

    def check(name: str, value: Any) -> None:
        are_pairs = isinstance(value, tuple) and all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
            for pair in value
        )
        if not are_pairs:
            raise TypeError(
                f"{name} must be a tuple of (pattern, {second}), got {value!r}"
            )
        for _, other in value:
            of_second.check(f"{name}: a {second}", other)

    def read(texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
        pairs = []
        for text in texts:
            pattern, equals, value = text.rpartition("=")
            if not (pattern and equals):
                raise ValueError(f"must be PATTERN={second.upper()}, got {text!r}")
            try:
                pairs.append((pattern, of_second.type(value)))
            except ValueError as error:
                raise ValueError(
                    f"{pattern}={value}: {value!r} is not a number"
                ) from error
        return tuple(pairs)

    return Kind(
        check,
        metavar=f"PATTERN={second.upper()}",
        action="append",
        read=read,
        write=lambda value: [f"{pattern}={other}" for pattern, other in value],
    )


# --- splits: kinds that the plugin knows, and numbers of rows or columns --------------

SplitKind = Literal["whole", "qkv", "heads", "gate-up", "parts"]

_SIZES = r"[1-9]\d*(?:,[1-9]\d*)+"
_OWN = re.compile(rf"(rows|cols|groups:[1-9]\d*):({_SIZES})|heads:([1-9]\d*)", re.ASCII)
FORMS = (
    f"{', '.join(get_args(SplitKind))}, rows:A,B,..., cols:A,A,..., heads:N, "
    "groups:N:A,B,..."
)


@dataclass(frozen=True, slots=True)
class OwnSplit:
    """Matrices by the sizes that a user gives; of the whole weight, at every TP
    size.
    """

    # ``rows`` and ``cols``: a matrix of each size, one after another; TP cuts each of
    # ``rows``; ``groups``: rows that repeat; ``heads``: as many equal ranges of rows
    of: str
    count: int  # number of groups or heads, else 1
    # of the matrices' rows or columns, in one group; of ``heads`` none
    sizes: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows or columns that it needs, of ``heads`` a multiple of it."""
        return self.count * (sum(self.sizes) or 1)


def own_split(kind: str) -> OwnSplit | None:
    """The split that ``rows:2048,4096``, ``heads:32`` and the like ask for; None for
    others.
    """
    match = _OWN.fullmatch(kind)
    if match is None:
        return None
    if match[3]:
        return OwnSplit("heads", int(match[3]), ())
    of, _, count = match[1].partition(":")
    return OwnSplit(of, int(count or 1), tuple(map(int, match[2].split(","))))


def check_split(name: str, kind: object) -> None:
    """Refuse, by a ValueError, what is no split."""
    if not (kind in get_args(SplitKind) or (isinstance(kind, str) and own_split(kind))):
        raise ValueError(f"{name} must be one of {FORMS}, got {kind!r}")
