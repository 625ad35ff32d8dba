"""JSON that anybody may have written: what is wrong with it is a ValueError, whatever
it is.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def parsed(text: str) -> Any:
    """The value of JSON; a ValueError for others, too deep ones, numbers that are not
    finite.
    """
    try:
        return json.loads(
            text, parse_constant=_refused, parse_int=_whole, parse_float=finite
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def finite(text: str) -> float:
    """A number from a file or a command line; a ValueError if it is none, or not
    finite.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


def _whole(text: str) -> int:
    finite(text)  # and so of at most 309 digits
    return int(text)


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
