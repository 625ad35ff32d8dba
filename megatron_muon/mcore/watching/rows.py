"""The rows of a logging step, and the one message in which it adds up their sums.

A row is a kind of matrix in a layer. The experts of a layer share a row, and so do the
heads of a weight. Every number is a sum beside the count that divides it: so replicas,
which add to both, change nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.layout import Matrix
from megatron_muon.rules.muon import update_scale
from megatron_muon.settings.rules import row_of

# The sums of a row. ``home_elements`` are those of whole matrices at their homes,
# ``moved`` ones those of matrices with a gradient. Logits have a message of their own,
# the ranks' maximum.
SUMS: Mapping[str, tuple[str, ...]] = {
    "muon": (
        "elements",
        "update_squares",
        "weight_squares",
        "momentum_squares",
        "gradient_squares",
        "gradient_updates",
        "matrices",
        "home_elements",
        "moved",
        "moved_elements",
    ),
    "adamw": ("elements", "weight_squares", "gradient_squares"),
    "layers": ("elements", "output_squares"),
    "logits": (),
}
_AT_ONCE = 1 << 22  # elements of a product in fp32; its sum goes on in fp64
_LOCAL_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_GROUPED_EXPERT = re.compile(r"(\.experts\..*\.(?:weight|bias))\d+$")


def row_name(name: str) -> str:
    """The row of a parameter, or of its [matrix], without the numbers of experts and
    heads.
    """
    parameter, _, matrix = name.partition("[")
    parameter = _GROUPED_EXPERT.sub(r"\1", _LOCAL_EXPERT.sub(".", parameter))
    matrix = re.sub(r"\s*\d+", "", matrix.rstrip("]")).strip()
    row = parameter.removesuffix(".weight")
    return row if matrix in ("", "expert") else f"{row}[{matrix}]"


def muon_rows(
    matrices: Iterable[Matrix], numerics: Numerics
) -> dict[str, dict[str, float]]:
    """``elements`` and ``promised_rms`` of each row of a stage's matrices.

    The latter is the root mean square of an update per unit of lr if directions
    are orthogonal, in the mean of the row; the rule hyperball promises none, since no
    radius is known yet, and rules that adapt a direction have no ``update_rms``.
    """
    elements = Counter[str]()
    squares: dict[str, float] = defaultdict(float)
    for matrix in matrices:
        name = row_name(matrix.name)
        scale = update_scale(*matrix.whole, numerics.where(matrix.own).config)
        elements[name] += matrix.numel
        squares[name] += matrix.numel * scale**2 / max(matrix.whole)
    rule = row_of(numerics.config.rule)
    rows: dict[str, dict[str, float]] = {}
    for name, count in sorted(elements.items()):
        rows[name] = {"elements": count}
        if rule.scales and not rule.adapts:
            rows[name]["promised_rms"] = math.sqrt(squares[name] / count)
    return rows


class Table:
    """The rows of all stages, and the place of each sum in the message.

    ``adapts``: the rule's updates are not the directions that are observed.
    """

    def __init__(self, stages: Sequence[Mapping[str, Any]], *, adapts: bool) -> None:
        self.adapts = adapts
        self.names: dict[str, list[str]] = {}
        # the place of each sum in the message, by its kind, row and name
        self.places: dict[tuple[str, str, str], int] = {}
        for kind, sums in SUMS.items():
            rows = chain.from_iterable(stage[kind] for stage in stages)
            # each name once: a tied embedding is on two stages
            self.names[kind] = list(dict.fromkeys(rows))
            for row, name in product(self.names[kind], sums):
                self.places[kind, row, name] = len(self.places)
        self.about: dict[str, dict[str, float]] = {}
        for stage in stages:
            self.about |= stage["muon"]

    def sums(self, totals: Sequence[float], kind: str, row: str) -> dict[str, float]:
        """The sums of a row by name."""
        return {name: totals[self.places[kind, row, name]] for name in SUMS[kind]}


class Message:
    """This rank's sums of a logging step, put together in one tensor on ``device``."""

    def __init__(self, table: Table, device: torch.device) -> None:
        self._places = table.places
        self._device = device
        self._known = [0.0] * len(table.places)
        self._computed: list[tuple[int, Tensor]] = []

    def add(self, kind: str, row: str, **values: Tensor | float) -> None:
        """Add to sums of a row, by name; a GPU may still be computing them."""
        for name, value in values.items():
            place = self._places[kind, row, name]
            if isinstance(value, Tensor):
                self._computed.append((place, value))
            else:
                self._known[place] += value

    def total(self) -> Tensor:
        """``(len(table.places),)`` fp64."""
        total = torch.tensor(self._known, dtype=torch.float64).to(self._device)
        if self._computed:
            places, values = zip(*self._computed, strict=True)
            at = torch.tensor(places).to(self._device)
            total.index_add_(0, at, torch.stack([value.double() for value in values]))
        return total


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Σ first × second in fp64, a scalar; ``(n,)`` each, of any floating dtypes."""
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    firsts = torch.split(first, _AT_ONCE)
    seconds = torch.split(second, _AT_ONCE)
    for some, others in zip(firsts, seconds, strict=True):
        total += torch.dot(some.float(), others.float())
    return total
