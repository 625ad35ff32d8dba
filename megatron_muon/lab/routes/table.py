"""Routes as a table for people, where layers and experts share lines, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_muon.lab.routes.parameters import Routed, RoutedParameter, RoutedStage, Routes
from megatron_muon.settings.config import MuonConfig

_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
_HEADER = ("parameter", "local shape", "TP", "optimizer", "matrices", "scale", "home")


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """The megatron-core that the model was built with: its version and its folder."""

    version: str
    folder: str


def as_json(routes: Routes, config: MuonConfig, notes: Sequence[str], core: Core) -> str:
    """Everything; ``home`` is an index of the stage's ``ranks``."""
    return json.dumps(
        {
            "megatron_core": dataclasses.asdict(core),
            "ranks": dataclasses.asdict(routes.ranks),
            "settings": dataclasses.asdict(config),
            "notes": list(notes),
            "lines": list(routes.lines),
            "stages": [_stage_as_json(stage) for stage in routes.stages],
        },
        indent=1,
    )


def _stage_as_json(stage: RoutedStage) -> dict[str, Any]:
    return {
        "stage": stage.number,
        "ranks": list(stage.ranks),
        "plan_cpu_seconds": round(stage.plan_seconds, 4),
        "lines": list(stage.lines),
        "parameters": [
            {
                "name": row.name,
                "shape": list(row.shape),
                "tp": row.tp,
                "ep_rank": row.ep_rank,
                "optimizer": row.optimizer,
                "reason": row.reason,
                "lr_mult": row.multipliers[0],
                "wd_mult": row.multipliers[1],
                "matrices": [dataclasses.asdict(matrix) for matrix in row.matrices],
            }
            for row in stage.rows
        ],
    }


def as_text(routes: Routes, core: Core, *, every: bool) -> str:
    """The core, a table for each stage, then the lines that a run prints.

    Args:
        routes: those to show.
        core: the megatron-core that they were built with.
        every: a line for each parameter; else parameters that differ in their layer's and expert's
            numbers only share one.
    """
    lines = [f"megatron-core {core.version} ({core.folder})", ""]
    for stage in routes.stages:
        lines.append(_heading(stage))
        cells = [_cells(rows) for rows in ([r] for r in stage.rows)] if every else _shared(stage)
        lines += [*_aligned([_HEADER, *cells]), ""]
    lines += routes.lines
    lines += [line for stage in routes.stages for line in stage.lines]
    return "\n".join(lines)


def _heading(stage: RoutedStage) -> str:
    ranks = numbers(stage.ranks)
    return f"pipeline stage {stage.number}, {len(stage.ranks)} rank(s) of the world: {ranks}"


def _shared(stage: RoutedStage) -> list[tuple[str, ...]]:
    """Cells of the lines, in the order of their first parameters."""
    alike: dict[tuple[Any, ...], list[RoutedParameter]] = {}
    for row in stage.rows:
        sizes = tuple((m.rows, m.cols) for m in row.matrices)
        kind = (row.shape, row.tp, row.reason, row.multipliers, sizes)
        alike.setdefault((_numbered(row.name)[0], kind), []).append(row)
    return [_cells(part) for rows in alike.values() for part in _products(rows)]


def _products(rows: Sequence[RoutedParameter]) -> Iterable[list[RoutedParameter]]:
    """Parts of ``rows`` whose names are all numbers of layers times all numbers of experts."""
    by_layer: dict[int | None, list[RoutedParameter]] = {}
    for row in rows:
        by_layer.setdefault(_numbered(row.name)[1], []).append(row)
    parts: dict[tuple[int | None, ...], list[RoutedParameter]] = {}
    for members in by_layer.values():
        experts = tuple(_numbered(row.name)[2] for row in members)
        parts.setdefault(experts, []).extend(members)
    return parts.values()


def _cells(rows: Sequence[RoutedParameter]) -> tuple[str, ...]:
    """One line for parameters that differ in numbers only."""
    first = rows[0]
    pattern, _, _ = _numbered(first.name)
    layers = [layer for _, layer, _ in (_numbered(row.name) for row in rows) if layer is not None]
    experts = [e for _, _, e in (_numbered(row.name) for row in rows) if e is not None]
    name = pattern.format(layer=_braced(layers), expert=_braced(experts))
    shape = "x".join(map(str, first.shape))
    optimizer = " ".join([first.optimizer, *_factors(first)])
    if first.reason is not None:
        return (name, shape, first.tp, optimizer, f"({first.reason})", "", "")
    homes = sorted({matrix.home for row in rows for matrix in row.matrices})
    one_by_one = len(rows) == 1 and len(first.matrices) <= 4
    home = ",".join(str(m.home) for m in first.matrices) if one_by_one else f"{len(homes)} ranks"
    if len(homes) == 1:
        home = str(homes[0])
    scales = " ".join(dict.fromkeys(f"{matrix.scale:.4g}" for matrix in first.matrices))
    return (name, shape, first.tp, optimizer, _matrices(first.matrices), scales, home)


def _factors(row: RoutedParameter) -> list[str]:
    """``lr*0.5 wd*0``: the multipliers that are not 1."""
    named = zip(("lr", "wd"), row.multipliers, strict=True)
    return [f"{what}*{factor:g}" for what, factor in named if factor != 1.0]


def _matrices(matrices: Sequence[Routed]) -> str:
    """``q 4096x4096, k,v 1024x4096``; numbered ones are counted: ``32 q,8 k,8 v 128x4096``."""
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
        parts = [f"{n} {part}" if part in numbered else part for part, n in counts.items()]
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


def _braced(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{{{numbers(values)}}}"


def numbers(values: Iterable[int]) -> str:
    """``0..3,5`` for 0, 1, 2, 3 and 5."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)


def _aligned(lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns of equal width; a long reason may run on into empty cells behind it."""
    widths = [
        max(len(line[column]) for line in lines if not line[column].startswith("("))
        for column in range(len(_HEADER))
    ]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
