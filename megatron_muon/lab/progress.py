"""A bar with steps and the time left, on a terminal and where tqdm is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

_Thing = TypeVar("_Thing")


def progress(things: Iterable[_Thing], text: str, **options: Any) -> Iterable[_Thing]:
    """The things, with a bar of them on stderr that goes when they end; ``options`` are
    tqdm's.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        return things
    bar: Iterable[_Thing] = tqdm(
        things, text, leave=False, **{"disable": None} | options
    )
    return bar
