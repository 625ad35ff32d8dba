"""Whether a digest has all that its readers take from it, of the types that they expect.

A digest's hash has no secret: whoever writes one can seal it. So no reader may fail on it, nor look
at a file outside of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

_OPTIMIZERS = ("muon", "adamw", "frozen")
_MOST = 1 << 62  # elements along a dimension, or bytes


def problem(digest: Mapping[str, Any]) -> str | None:
    """What an intact digest of our format lacks, in words; None where nothing."""
    if not isinstance(digest.get("complete"), bool):
        return "complete is neither true nor false"
    if not _is_plain(digest.get("wrote")):
        return "wrote is no object of plain values"
    if not digest["complete"]:
        return None
    settings = digest.get("settings")
    if settings is not None and not _is_plain(settings, depth=2):
        return "settings are no object of plain values"
    if not isinstance(digest.get("vocabulary"), int | None):
        return "vocabulary is no number"
    return _of_each(digest, "parameters", _parameter) or _of_each(digest, "files", _file)


def _of_each(
    digest: Mapping[str, Any], part: str, check: Callable[[str, Mapping[str, Any]], str | None]
) -> str | None:
    entries = digest.get(part)
    if not isinstance(entries, dict):
        return f"{part} are no object"
    for name, entry in entries.items():
        wrong = check(name, entry) if isinstance(entry, dict) else "it is no object"
        if wrong:
            return f"{part}, {name[:100]!r}: {wrong}"
    return None


def _parameter(_: str, entry: Mapping[str, Any]) -> str | None:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        return "its shape is no list of sizes"
    if entry.get("optimizer") not in _OPTIMIZERS:
        return f"its optimizer is none of {', '.join(_OPTIMIZERS)}"
    return None


def _file(name: str, entry: Mapping[str, Any]) -> str | None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        return "it is no file of the checkpoint"
    if not _is_count(entry.get("size")) or not isinstance(entry.get("hash"), str):
        return "it has no size or no hash"
    holds = entry.get("holds", [])
    if not isinstance(holds, list) or not all(isinstance(name, str) for name in holds):
        return "what it holds is no list of names"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_plain(value: Any, depth: int = 0) -> bool:
    """An object whose values are scalars, or to a depth lists of them."""
    return isinstance(value, dict) and all(_is_shallow(each, depth) for each in value.values())


def _is_shallow(value: Any, depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and all(_is_shallow(each, depth - 1) for each in value)
    return isinstance(value, (bool, int, float, str, type(None)))
