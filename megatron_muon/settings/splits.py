"""The splits of ``--muon-split``: kinds that the plugin knows, and numbers of rows or
columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

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
