"""Settings of the parameters whose names match a pattern: ``PATTERN:KEY=VALUE,...``.

As texts they are the same on a command line, in a framework's configuration, in the
digest and in messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from megatron_muon.settings import kinds
from megatron_muon.settings.rows import row, rows_of
from megatron_muon.settings.update import UpdateSettings

Settings = Mapping[str, Any]  # by key
ByPattern = tuple[str, ...] | Mapping[str, Settings]

# Keys of Megatron's parameter groups, of Muon's parameters and of AdamW's.
OF_GROUPS = ("lr", "min_lr", "weight_decay")
# of what a home does with a matrix, which matrices of one batch share
AT_HOMES = ("scale_mode", "ns_steps", "ns_coefficients")
OF_MATRICES = ("rms", "momentum", *AT_HOMES)
_FIELDS = {"rms": "matched_adamw_rms"}  # of a key that is no setting's name
_ROWS = rows_of(UpdateSettings)
_KINDS = dict.fromkeys(OF_GROUPS, kinds.MULTIPLIER)
for _key in OF_MATRICES:
    _KINDS[_key] = _ROWS[_FIELDS.get(_key, _key)].flags[0].kind
_NEXT = re.compile(r",(?=[a-z_]+=)")  # numbers of coefficients have commas, too
_PART = re.compile(r"(.*)\[([^\[\]]*)\]")


@lru_cache(1024)
def read(text: str) -> Settings:
    """The settings of ``KEY=VALUE,...``; a TypeError or ValueError names the key."""
    found: dict[str, Any] = {}
    for part in _NEXT.split(text) if text else ():
        key, equals, value = part.partition("=")
        if key not in _KINDS or not equals:
            raise ValueError(
                f"{part!r} is no setting by pattern: give KEY=VALUE, with a key of "
                f"{', '.join(_KINDS)}"
            )
        if key in found:
            raise ValueError(f"{key} is given twice: give it once")
        kind = _KINDS[key]
        try:
            meaning = kind.type(value)
        except ValueError:
            raise ValueError(f"{key} must be a number, got {value!r}") from None
        found[key] = kind.read(meaning)
        kind.check(key, found[key])
    return found


def written(settings: Settings) -> str:
    """The text that ``read`` reads as these settings, in one order of keys."""
    texts = []
    for key in sorted(settings, key=lambda key: [*_KINDS, key].index(key)):
        value = settings[key]
        texts.append(f"{key}={_KINDS[key].write(value) if key in _KINDS else value}")
    return ",".join(texts)


def fields_of(text: str) -> dict[str, Any]:
    """The fields of MuonConfig that ``KEY=VALUE,...`` sets."""
    return {
        _FIELDS.get(key, key): value
        for key, value in read(text).items()
        if key not in OF_GROUPS
    }


def pairs_of(given: ByPattern) -> Iterator[tuple[str, str]]:
    """Each pattern, and its settings as a text.

    Raises:
        TypeError: these are neither texts nor a mapping to mappings.
        ValueError: a text has no pattern.
    """
    if isinstance(given, Mapping):
        for pattern, settings in given.items():
            if not isinstance(settings, Mapping) or not settings:
                raise TypeError(
                    f"{pattern!r} must have a mapping of settings, got {settings!r}"
                )
            yield pattern, written(settings)
        return
    if not isinstance(given, tuple) or not all(isinstance(x, str) for x in given):
        raise TypeError(
            "must be a mapping from a pattern to its settings, or a tuple of texts "
            f"PATTERN:KEY=VALUE,..., got {given!r}"
        )
    for text in given:
        pattern, _, own = text.partition(":")
        if not (pattern and own):
            raise ValueError(f"must be PATTERN:KEY=VALUE,..., got {text!r}")
        yield pattern, own


def canonical_texts(given: ByPattern) -> tuple[str, ...]:
    """The same as texts, with numbers and keys written in one way.

    Raises:
        TypeError, ValueError: a pattern without settings, or settings that cannot be.
    """
    texts = []
    for pattern, text in pairs_of(given):
        settings = read(text)
        if settings.get("min_lr", 0.0) > settings.get("lr", kinds.MOST):
            raise ValueError(
                f"min_lr {settings['min_lr']} is above lr {settings['lr']}"
            )
        if "scale_mode" in settings and "rms" not in settings:
            raise ValueError(
                f"scale_mode {settings['scale_mode']} needs the factor that it is "
                "multiplied by: add rms (1 in Megatron's own Muon, 0.2 with spectral)"
            )
        texts.append(f"{pattern}:{written(settings)}")
    return tuple(texts)


def settings_of(given: ByPattern, names: Sequence[str], part: str = "") -> Settings:
    """The settings of a parameter, or of a matrix in it: of each key the last
    pattern's.

    Args:
        names: the parameter's name, and those of its tied copies.
        part: the matrix in it, which routes prints in brackets behind the name.
    """
    found: dict[str, Any] = {}
    for pattern, settings in pairs_of(given):
        if fits(pattern, names, part):
            found.update(read(settings))
    return found


def fits(pattern: str, names: Sequence[str], part: str = "") -> bool:
    """Whether a pattern matches a parameter's name, or with brackets a part of it."""
    if any(fnmatchcase(name, pattern) for name in names):
        return True
    in_brackets = _PART.fullmatch(pattern)
    if in_brackets is None or not part:
        return False
    of_name, of_part = in_brackets.groups()
    return fits(of_name, names) and fnmatchcase(part, of_part)


def only(text: str, keys: Sequence[str]) -> str:
    """The settings of ``KEY=VALUE,...`` that have one of these keys."""
    settings = read(text)
    return written({key: settings[key] for key in keys if key in settings})


def _check(name: str, value: Any) -> None:
    try:
        canonical_texts(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class PatternSettings:
    """Settings by kind of layer; ``MuonConfig`` has all settings."""

    by_pattern: ByPattern = row(
        (),
        "--muon-for",
        "Settings of the parameters whose names match a pattern. lr, min_lr and "
        "weight_decay are of Muon's and AdamW's parameters, and take the place of "
        "--lr, --min-lr and --weight-decay; the others are of Muon's matrices: rms, "
        "scale_mode, momentum, ns_steps and ns_coefficients. May be given several "
        "times; of each setting the last pattern that matches counts. "
        "docs/routing.md has examples.",
        kinds.Kind(
            _check,
            metavar="PATTERN:KEY=VALUE,...",
            action="append",
            read=tuple,
            write=list,
        ),
        without="The default is the same settings for all.",
    )
