"""How a run's ranks are divided, as ``tp2-pp2-dp2`` says it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = re.compile(r"(tp|pp|dp|cp)(\d{1,5})")
USUAL = ("dp4", "tp4", "tp2-dp2", "pp2-dp2", "tp2-pp2-dp2")


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of tensor, pipeline, context and data parallelism."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}
        return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp1"


def parsed(text: str) -> Topology:
    """The topology of a text such as ``tp2-pp2-dp2``; sizes that are left out are 1.

    Raises:
        ValueError: it is none; says what one is.
    """
    sizes: dict[str, int] = {}
    for part in text.lower().split("-"):
        size = _SIZE.fullmatch(part)
        if size is None or size[1] in sizes or not int(size[2]):
            raise ValueError(
                f"{text!r} is no topology: give sizes of tp, pp, cp and dp, such as tp2-pp2-dp2"
            )
        sizes[size[1]] = int(size[2])
    return Topology(**sizes)
