"""Routes as a table for people, where layers and experts share lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_muon.lab.routes.parameters import (
    Routed,
    RoutedParameter,
    RoutedStage,
    Routes,
)
from megatron_muon.lab.tables import listed, wrapped

_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")
_EXPERT = re.compile(
    r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)"
)
_HEADER = ("parameter", "local shape", "TP", "optimizer", "scale", "home", "matrices")


def as_text(routes: Routes, *, every: bool) -> str:
    """A table for each stage, then the lines that a run prints.

    Parameters that differ in their layer's and expert's numbers only share a line, if
    not ``every`` one has its own.
    """
    lines = []
    for stage in routes.stages:
        ranks = numbers(stage.ranks)
        lines += wrapped(
            f"pipeline stage {stage.stage}, {len(stage.ranks)} rank(s) of the world: "
            f"{ranks}"
        )
        shared = [[row] for row in stage.parameters] if every else _shared(stage)
        lines += [*listed([_HEADER, *map(_cells, shared)]), ""]
    every_line = itertools.chain(
        routes.lines, *(stage.lines for stage in routes.stages)
    )
    for line in every_line:
        lines += wrapped(line)
    return "\n".join(lines)


def _shared(stage: RoutedStage) -> list[list[RoutedParameter]]:
    """Parameters that share a line, in the order of the first ones.

    Their names are all numbers of some layers times all numbers of some experts.
    """
    kinds: dict[Any, dict[int | None, list[RoutedParameter]]] = {}
    for row in stage.parameters:
        pattern, layer, _ = _numbered(row.name)
        sizes = tuple((m.rows, m.cols) for m in row.matrices)
        rates = row.lr_mult, row.wd_mult, _own(row)
        kind = pattern, row.shape, row.tp, row.reason, *rates, sizes
        kinds.setdefault(kind, {}).setdefault(layer, []).append(row)
    lines: list[list[RoutedParameter]] = []
    for by_layer in kinds.values():
        by_experts: dict[tuple[int | None, ...], list[RoutedParameter]] = {}
        for members in by_layer.values():
            experts = tuple(_numbered(row.name)[2] for row in members)
            by_experts.setdefault(experts, []).extend(members)
        lines += by_experts.values()
    return lines


def _cells(rows: Sequence[RoutedParameter]) -> tuple[str, ...]:
    """One line for parameters that differ in numbers only."""
    first = rows[0]
    layers: set[int | None] = set()
    experts: set[int | None] = set()
    for row in rows:
        pattern, layer, expert = _numbered(row.name)
        layers.add(layer)
        experts.add(expert)
    name = pattern.format(layer=_braced(layers), expert=_braced(experts))
    shape = "x".join(map(str, first.shape))
    optimizer: str = first.optimizer
    for what, factor in (("lr", first.lr_mult), ("wd", first.wd_mult)):
        if factor != 1.0:
            optimizer += f" {what}*{factor:g}"
    optimizer = " ".join((optimizer, *_own(first)))
    cells = (name, shape, first.tp, optimizer)
    if first.reason is not None:
        return (*cells, "", "", f"({first.reason})")
    scales = dict.fromkeys(
        "-" if matrix.scale is None else f"{matrix.scale:.4g}"
        for matrix in first.matrices
    )
    return (*cells, " ".join(scales), _homes(rows), _matrices(first.matrices))


def _own(row: RoutedParameter) -> tuple[str, ...]:
    """Its settings by pattern, and those of its matrices, with names if they differ."""
    of_matrices = list(dict.fromkeys(matrix.settings for matrix in row.matrices))
    if len(of_matrices) > 1:
        of_matrices = [
            f"[{matrix.name.partition('[')[2]}:{matrix.settings}"
            for matrix in row.matrices
            if matrix.settings
        ]
    return tuple(filter(None, (row.settings, *of_matrices)))


def _homes(rows: Sequence[RoutedParameter]) -> str:
    """The home of all, those of a few matrices, or the number of homes."""
    homes = [matrix.home for row in rows for matrix in row.matrices]
    different = set(homes)
    if len(different) == 1:
        return str(homes[0])
    if len(rows) == 1 and len(homes) <= 4:
        return ",".join(map(str, homes))
    return f"{len(different)} ranks"


def _matrices(matrices: Sequence[Routed]) -> str:
    """``q 4096x4096, k,v 1024x4096``; numbered ones are counted: ``32 q,8 k,8 v
    128x4096``.
    """
    by_size: dict[str, dict[str, int]] = {}
    numbered: set[str] = set()
    for matrix in matrices:
        part, _, number = matrix.name.partition("[")[2].rstrip("]").partition(" ")
        numbered |= {part} if number else set()
        counts = by_size.setdefault(f"{matrix.rows}x{matrix.cols}", {})
        counts[part] = counts.get(part, 0) + 1
    texts = []
    for size, counts in by_size.items():
        if len(matrices) > 1 and set(counts) == {"expert"}:
            texts.append(f"{counts['expert']} of {size}")
            continue
        parts = [
            f"{n} {part}" if part in numbered else part for part, n in counts.items()
        ]
        texts.append(f"{','.join(parts)} {size}".strip())
    return ", ".join(texts)


def _numbered(name: str) -> tuple[str, int | None, int | None]:
    """The name with ``{layer}`` and ``{expert}`` in place of the numbers, and those."""
    layer = expert = None
    if match := _EXPERT.match(name):
        name, expert = f"{match[1]}{{expert}}{match[3]}", int(match[2])
    if match := _LAYER.match(name):
        name, layer = f"{match[1]}{{layer}}{match[3]}", int(match[2])
    return name, layer, expert


def _braced(values: Iterable[int | None]) -> str:
    known = numbers(value for value in values if value is not None)
    return known if known.isdecimal() else f"{{{known}}}"


def numbers(values: Iterable[int]) -> str:
    """``0..3,5`` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)
