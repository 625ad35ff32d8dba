"""The rows of a record, and their places in the one message that a logging step adds up.

A row is a kind of matrix in a layer. The experts of a layer share a row, and so do the heads of a
weight. Every number is a sum beside the count that divides it: so replicas, which add to both,
change nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from megatron_muon.planning.slices import Matrix
from megatron_muon.runtime.update import update_scale
from megatron_muon.settings.config import MuonConfig

Kind = Literal["muon", "adamw", "layers", "logits"]

# The sums of a row. Squares are of elements; ``spectral_squares`` and ``orthogonality_squares`` are
# of matrices. ``home_elements`` are those of whole matrices at their homes, ``moved`` ones those of
# matrices with a gradient.
SUMS: Mapping[Kind, tuple[str, ...]] = {
    "muon": (
        *("elements", "update_squares", "weight_squares", "momentum_squares"),
        *("gradient_squares", "gradient_updates"),
        *("matrices", "spectral_squares", "home_elements"),
        *("moved", "moved_elements", "orthogonality_squares", "ranks"),
    ),
    "adamw": ("elements", "weight_squares", "gradient_squares"),
    "layers": ("elements", "output_squares"),
    "logits": (),  # they have a message of their own, of which the ranks' maximum is taken
}
PLACE: Mapping[Kind, Mapping[str, int]] = {
    kind: {name: at for at, name in enumerate(names)} for kind, names in SUMS.items()
}

_LOCAL_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_GROUPED_EXPERT = re.compile(r"(\.experts\..*\.(?:weight|bias))\d+$")


@dataclass(frozen=True, slots=True)
class RecordRow:
    """One row.

    Attributes:
        kind: Muon's matrices, AdamW's parameters, a layer's output, or a group of heads' logits.
        name: see ``row_name``.
        elements: those of its matrices, each once; 0 but for Muon's.
        matrices: number of its matrices; 0 but for Muon's.
        promised: root mean square of its update per unit of lr, if directions were orthogonal.
        full_rank: the short side of its matrices, in the mean.
    """

    kind: Kind
    name: str
    elements: int = 0
    matrices: int = 0
    promised: float = 0.0
    full_rank: float = 0.0


def row_name(name: str) -> str:
    """The row of a parameter or matrix: without ``.weight`` and the numbers of experts and heads.

    Args:
        name: of a parameter, with the matrix in brackets where it holds several.
    """
    parameter, _, matrix = name.partition("[")
    parameter = _GROUPED_EXPERT.sub(r"\1", _LOCAL_EXPERT.sub(".", parameter))
    matrix = re.sub(r"\s*\d+", "", matrix.rstrip("]")).strip()
    row = parameter.removesuffix(".weight")
    return row if matrix in ("", "expert") else f"{row}[{matrix}]"


def muon_rows(matrices: Iterable[Matrix], config: MuonConfig) -> list[RecordRow]:
    """The rows of a stage's matrices."""
    members: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices:
        members[row_name(matrix.name)].append(matrix)
    return [_muon_row(name, alike, config) for name, alike in sorted(members.items())]


def _muon_row(name: str, matrices: Sequence[Matrix], config: MuonConfig) -> RecordRow:
    elements = sum(matrix.numel for matrix in matrices)
    squares = sum(m.numel * promised_rms(m, config) ** 2 for m in matrices)
    ranks = sum(min(m.rows, m.cols) for m in matrices)
    count = len(matrices)
    return RecordRow("muon", name, elements, count, math.sqrt(squares / elements), ranks / count)


def promised_rms(matrix: Matrix, config: MuonConfig) -> float:
    """Root mean square of an update per unit of lr, if the direction is orthogonal."""
    scale = update_scale(matrix.rows, matrix.cols, config)
    return scale / math.sqrt(max(matrix.rows, matrix.cols))


@dataclass(frozen=True, slots=True)
class StageRows:
    """The rows of one pipeline stage, how much of it is Muon's, and its Newton-Schulz work.

    Attributes:
        rows: its rows.
        muon, total: trainable elements of the stage, each once.
        flops, busiest: planned for all its ranks together, and for the one that has most.
        ranks: number of its ranks.
    """

    rows: tuple[RecordRow, ...]
    muon: int
    total: int
    flops: int
    busiest: int
    ranks: int

    def text(self) -> str:
        """The text that ``of_text`` reads, on another rank."""
        rows = [astuple(row) for row in self.rows]
        return json.dumps([rows, self.muon, self.total, self.flops, self.busiest, self.ranks])

    @staticmethod
    def of_text(text: str) -> StageRows:
        """The inverse of ``text``."""
        rows, *numbers = json.loads(text)
        return StageRows(tuple(RecordRow(*row) for row in rows), *numbers)


class Table:
    """The rows of all stages, and the place of each in the message.

    Args:
        parts: those of all stages, in the same order on every rank.
        ranks: number of ranks, each of which has a place for its time of Newton-Schulz.

    Attributes:
        rows: all rows, each name once: a tied embedding is on two stages.
        starts: the place of each row's first sum, by kind and name.
        logits: the place of each row of logits in their message, by name.
        times: the place of the first rank's time.
        size: length of the message.
        muon_share: Muon's share of the trainable elements.
        planned_ratio: Newton-Schulz work of the busiest rank over the mean; 0 without any.
    """

    def __init__(self, parts: Sequence[StageRows], ranks: int) -> None:
        every = {(row.kind, row.name): row for part in parts for row in part.rows}
        self.rows = tuple(every.values())
        names = [row.name for row in self.rows if row.kind == "logits"]
        self.logits = {name: at for at, name in enumerate(names)}
        self.starts: dict[tuple[Kind, str], int] = {}
        place = 0
        for row in self.rows:
            self.starts[row.kind, row.name] = place
            place += len(SUMS[row.kind])
        self.times, self.ranks = place, ranks
        self.size = place + ranks
        total = sum(part.total for part in parts)
        self.muon_share = sum(part.muon for part in parts) / total if total else 0.0
        flops = sum(part.flops for part in parts)
        mean = flops / sum(part.ranks for part in parts) if flops else math.inf
        self.planned_ratio = max((part.busiest for part in parts), default=0) / mean
