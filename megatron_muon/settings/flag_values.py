"""What the values of flags mean as settings, and settings written as values of flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_muon.settings.coefficients import Coefficients, canonical

_MIB_BITS = 20


def number_or(*words: str, zero: str = "") -> Callable[[str], int | str]:
    """An argument type: a whole number or one of some words; ``zero`` is the word for 0."""

    def parse(text: str) -> int | str:
        if text == zero:
            return 0
        return text if text in words else int(text)

    return parse


def count_or_none(value: int) -> int | None:
    """A number from 1; 0 leaves the choice open."""
    if value < 0:
        raise ValueError(f"must be at least 1, or 0 for the default, got {value}")
    return value or None


def none_as_zero(value: int | None) -> int:
    """The reverse of ``count_or_none``."""
    return value or 0


def bytes_of_mib(value: int) -> int | None:
    """Bytes; 0 leaves the choice open."""
    mib = count_or_none(value)
    return None if mib is None else int(mib) << _MIB_BITS


def mib_of_bytes(value: int | None) -> int:
    """The reverse of ``bytes_of_mib``."""
    return (value or 0) >> _MIB_BITS


def auto_as_none(value: str) -> str | None:
    """``auto`` leaves the choice to the device."""
    return None if value == "auto" else value


def none_as_auto(value: str | None) -> str:
    """The reverse of ``auto_as_none``."""
    return value or "auto"


def set_by_name(name: str) -> Coefficients | None:
    """A set by the name that Megatron's own Muon has; ``custom`` numbers come by another flag."""
    return None if name == "custom" else canonical(name)


def name_of_set(value: Any) -> str:
    """The reverse of ``set_by_name``."""
    coefficients = canonical(value)
    return coefficients if isinstance(coefficients, str) else "custom"


def pairs_of(second: str, kind: Callable[[str], Any]) -> Callable[[Sequence[str]], Any]:
    """Read ``PATTERN=VALUE`` texts as a tuple of pairs."""

    def read(texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
        pairs = []
        for text in texts:
            pattern, equals, value = text.rpartition("=")
            if not (pattern and equals):
                raise ValueError(f"must be PATTERN={second}, got {text!r}")
            try:
                pairs.append((pattern, kind(value)))
            except ValueError as error:
                raise ValueError(f"{pattern}={value}: {value!r} is not a number") from error
        return tuple(pairs)

    return read


def texts_of_pairs(pairs: Sequence[tuple[str, Any]]) -> list[str]:
    """The reverse of ``pairs_of``."""
    return [f"{pattern}={value}" for pattern, value in pairs]
