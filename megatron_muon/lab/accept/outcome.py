"""Results of checks, as data and as JSON. Values that are read from JSON are checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Verdict = Literal["ok", "FAILED", "not run"]
EXACT = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was predicted, measured, or both.

    Attributes:
        name, unit: its name and unit.
        predicted, measured: values; None where there is none.
        least, most: bounds of measured / predicted within which it is as predicted.
        constant: constant of the time model (``pricing.hardware``) that a wrong prediction
            corrects; empty where none does.
        value: value to set that constant to; None where the measurement gives none.
        corrects: in words, what else a wrong prediction corrects.
    """

    name: str
    unit: str
    predicted: float | None = None
    measured: float | None = None
    least: float = 0.8
    most: float = 1.25
    constant: str = ""
    value: float | None = None
    corrects: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where one is missing or the predicted value is 0."""
        if self.predicted is None or self.measured is None:
            return None
        if self.predicted == 0:
            return 1.0 if self.measured == 0 else None
        return self.measured / self.predicted

    @property
    def is_compared(self) -> bool:
        """Whether there are both values."""
        return self.predicted is not None and self.measured is not None

    @property
    def as_predicted(self) -> bool:
        """Whether the measured value is within the bounds; False where it cannot be said."""
        ratio = self.ratio
        return ratio is not None and self.least <= ratio <= self.most


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim of a check.

    Attributes:
        name: the claim.
        verdict: ``ok``, ``FAILED`` or ``not run``.
        text: what was looked at, the fault, or the reason why it was not run.
        figures: its numbers.
    """

    name: str
    verdict: Verdict
    text: str = ""
    figures: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict != "ok" and not self.text:
            raise ValueError(f"{self.name}: a part that is {self.verdict} says why")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a check.

    Attributes:
        check: name of the check.
        parts: its claims; at least one.
        seconds: wall time.
        log: last lines of its output, where it failed.
        is_final: False where another call is to run the check again, since this one had no time.
    """

    check: str
    parts: tuple[Finding, ...]
    seconds: float = 0.0
    log: str = ""
    is_final: bool = True

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"check {self.check} has made no claim")

    @property
    def verdict(self) -> Verdict:
        """``FAILED`` if a part failed; ``ok`` if one was run; else ``not run``."""
        verdicts = {part.verdict for part in self.parts}
        if "FAILED" in verdicts:
            return "FAILED"
        return "ok" if "ok" in verdicts else "not run"

    @property
    def missing(self) -> int:
        """Number of parts that were not run."""
        return sum(part.verdict == "not run" for part in self.parts)


def failed(check: str, why: str, seconds: float = 0.0, log: str = "") -> Outcome:
    """A check that failed as a whole."""
    return Outcome(check, (Finding(check, "FAILED", why),), seconds, log)


def not_run(check: str, why: str, *, is_final: bool = True) -> Outcome:
    """A check that was not run."""
    return Outcome(check, (Finding(check, "not run", why),), is_final=is_final)


def parts_as_json(parts: Sequence[Finding]) -> list[dict[str, Any]]:
    """Parts as JSON's values; numbers that are not finite become None."""
    return [_plain(dataclasses.asdict(part)) for part in parts]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON's values."""
    made: dict[str, Any] = _plain(dataclasses.asdict(outcome))
    return {"verdict": outcome.verdict, **made}


def parts_from_json(given: Any) -> tuple[Finding, ...]:
    """The reverse of ``parts_as_json``.

    Raises:
        ValueError: it is not what that function makes; names what is wrong.
    """
    return tuple(_part(each) for each in _list("parts", given))


def from_json(given: Any) -> Outcome:
    """The reverse of ``as_json``.

    Raises:
        ValueError: it is not what that function makes; names what is wrong.
    """
    fields = _object("an outcome", given)
    is_final = fields.get("is_final", True)
    if not isinstance(is_final, bool):
        raise ValueError(f"is_final must be true or false, got {is_final!r}")
    return Outcome(
        check=_text("check", fields),
        parts=parts_from_json(fields.get("parts")),
        seconds=_number("seconds", fields) or 0.0,
        log=_text("log", fields),
        is_final=is_final,
    )


def _part(given: Any) -> Finding:
    fields = _object("a part", given)
    verdict: Any = fields.get("verdict")
    if verdict not in get_args(Verdict):
        raise ValueError(f"a verdict is one of {', '.join(get_args(Verdict))}, got {verdict!r}")
    figures = tuple(_figure(each) for each in _list("figures", fields.get("figures", [])))
    known: Verdict = verdict
    return Finding(_text("name", fields), known, _text("text", fields), figures)


def _figure(given: Any) -> Figure:
    fields = _object("a figure", given)
    texts = {name: _text(name, fields) for name in ("name", "unit", "constant", "corrects")}
    least, most = (_number(name, fields) for name in ("least", "most"))
    return Figure(
        **texts,
        predicted=_number("predicted", fields),
        measured=_number("measured", fields),
        value=_number("value", fields),
        least=0.0 if least is None else least,
        most=math.inf if most is None else most,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _object(what: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{what} is a JSON object, got {given!r:.60}")
    return given


def _list(what: str, given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"{what} is a JSON list, got {given!r:.60}")
    return given


def _text(name: str, fields: Mapping[str, Any]) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r:.60}")
    return value


def _number(name: str, fields: Mapping[str, Any]) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r:.60}")
    return value
