"""Rows by the kind of their matrix, over all layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LAYER = re.compile(r"^(.*\blayers)\.(\d+)(?:\.(.*))?$")


def by_kind(rows: Sequence[str]) -> dict[str, list[tuple[int | None, str]]]:
    """``(layer, row)`` of each row, in the order of layers, by its name without the layer."""
    kinds: dict[str, list[tuple[int | None, str]]] = {}
    for row in rows:
        match = _LAYER.match(row)
        number = match[2] if match else ""
        if match is None or len(number) > 9:
            kinds.setdefault(row, []).append((None, row))
            continue
        around = match[1].removesuffix("layers")
        kinds.setdefault(around + match[3] if match[3] else match[1], []).append((int(number), row))
    return {kind: sorted(rows, key=lambda row: row[0] or 0) for kind, rows in kinds.items()}
