"""Signs of life of a command on stderr: what it does now, and how far it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")


def announce(text: str) -> None:
    """Say what takes some time now."""
    print(text, file=sys.stderr, flush=True)


def progress(things: Sequence[_Thing], text: str, **options: Any) -> Iterable[_Thing]:
    """The things, with a bar of them on a terminal, which disappears when they end.

    ``options`` are tqdm's. Where tqdm is not installed, the things are counted.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return _counted(things, text)
    bar: Iterable[_Thing] = tqdm(
        things, text, leave=False, **{"disable": None} | options
    )
    return bar


def _counted(things: Sequence[_Thing], text: str) -> Iterator[_Thing]:
    for number, thing in enumerate(things, 1):
        if sys.stderr.isatty():
            end = "\r" if number < len(things) else "\n"
            print(f"{text}: {number}/{len(things)}", end=end, file=sys.stderr)
        yield thing
