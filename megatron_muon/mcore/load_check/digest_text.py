"""The text of a digest: JSON with a hash of itself, and types that its readers can rely on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

MOST = 1 << 28  # bytes; a million parameters take about half of it


def sealed(content: Mapping[str, Any]) -> str:
    """A digest's text, with the hash of its content."""
    text = json.dumps(content, indent=1, sort_keys=True)
    whole = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "hash": whole}, indent=1, sort_keys=True) + "\n"


def opened(text: str) -> dict[str, Any]:
    """The content of ``sealed``, with ``hash``.

    Raises:
        ValueError: the text is not one of ``sealed``, or is nested too deeply to be read.
    """
    try:
        content = json.loads(text)
        intact = sealed({key: content[key] for key in content if key != "hash"}) == text
    except (ValueError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("it is not what was written")
    return dict(content)


def completed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A digest's content with all keys of its format, after a check of the types that it has.

    A hash is no protection against intent, so a digest may have other types despite its hash.

    Args:
        content: the content of a digest of the format that is read here.

    Raises:
        ValueError: names the key that is wrong.
    """
    for key, (_, is_right) in _KEYS.items():
        if key in content and not is_right(content[key]):
            raise ValueError(f"its {key} is not what a digest has there")
    return {**{key: default for key, (default, _) in _KEYS.items()}, **content}


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _is_save(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), kind)
        for key, kind in (("id", str), ("host", str), ("began", str), ("pid", int), ("job", dict))
    )


def _are_parameters(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("shape"), list)
        and all(_is_number(size) for size in entry["shape"])
        and isinstance(entry.get("optimizer"), str)
        and isinstance(entry.get("split", ""), str)
        for entry in value.values()
    )


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_below(name)
        and isinstance(entry, dict)
        and _is_number(entry.get("size"))
        and isinstance(entry.get("hash"), str)
        and isinstance(entry.get("holds", []), list)
        and all(isinstance(held, str) for held in entry.get("holds", []))
        for name, entry in value.items()
    )


def _is_below(name: str) -> bool:
    """Whether a path stays in its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


# By key: its value where a digest has none, and whether a value is of its type.
_KEYS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "complete": (False, lambda value: isinstance(value, bool)),
    "wrote": ({}, lambda value: isinstance(value, dict)),
    "save": (None, lambda value: value is None or _is_save(value)),
    "settings": (None, lambda value: value is None or isinstance(value, dict)),
    "vocabulary": (None, lambda value: value is None or _is_number(value)),
    "model": ({}, lambda value: isinstance(value, dict)),
    "parameters": ({}, _are_parameters),
    "files": ({}, _are_files),
}
