"""Tables of the lab: as wide as the terminal, or in Markdown for a report."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from megatron_muon.console import printable

# columns that a text has at least; of what stands below its name
_NARROW, _INDENT = (16, 4)


def width() -> int:
    """Columns of the terminal, or of the variable COLUMNS; 80 where there is
    neither.
    """
    return shutil.get_terminal_size().columns


def wrapped(text: str, indent: str = "  ", within: int | None = None) -> list[str]:
    """Lines of a text that fit the terminal; only a long path or word is wider."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, within or width(), subsequent_indent=indent, **options)


def show(*texts: str, to: TextIO | None = None) -> None:
    """Print texts as ``wrapped`` has them; an empty one is an empty line."""
    for text in texts:
        print_lines(wrapped(text), to=to)


def print_lines(lines: Iterable[str], to: TextIO | None = None) -> None:
    """Print lines, with escapes for control characters: of a file, they could act on a
    terminal.
    """
    print(printable("\n".join(lines), kept="\n"), file=to, flush=True)


def digits(value: float, most: int = 3) -> str:
    """A number of at least 0 in three digits, or in more where its whole part has
    more.
    """
    return f"{value:.{most}g}" if value < 10**most - 0.5 else f"{value:.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of numbers, the heads first, that fits the terminal.

    Heads break between words. Columns that do not fit go below the others, beside the
    first one again and without the rows that are empty there.
    """
    columns = list(zip(*rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    if sum(sizes) + 2 * (len(sizes) - 1) > width():
        sizes = [max(map(len, (*head.split(), *cells))) for head, *cells in columns]
    bands = [[0]]
    for at in range(1, len(sizes)):
        taken = sum(sizes[column] + 2 for column in bands[-1])
        if taken + sizes[at] > width() and len(bands[-1]) > 1:
            bands.append([0])
        bands[-1].append(at)
    lines: list[str] = []
    for band in bands:
        heads = [textwrap.wrap(rows[0][at], sizes[at]) for at in band]
        cells = list(itertools.zip_longest(*heads, fillvalue=""))
        for row in rows[1:]:
            first, *others = (row[at] for at in band)
            if not set(others) <= {"", "-"}:
                cells.append((first, *others))
        lines += ["", *(_line(row, [sizes[at] for at in band]) for row in cells)]
    return lines[1:]


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    first, *others = zip(cells, sizes, strict=True)
    right = [f"{cell:>{size}}" for cell, size in others]
    return "  ".join([f"{first[0]:{first[1]}}", *right]).rstrip()


def listed(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of texts that fits the terminal: its last column breaks between
    words.

    Where that stays too narrow, the first one has a line of its own above the others.
    """
    *sizes, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = width() - sum(size + 2 for size in sizes)
    is_above = room < min(last, _NARROW) and len(sizes) > 1
    lines: list[str] = []
    for cells in rows:
        if is_above:
            lines += [cells[0], *_entry(cells[1:], sizes[1:], _INDENT)]
        else:
            lines += _entry(cells, sizes, 0)
    return lines


def _entry(cells: Sequence[str], sizes: Sequence[int], indent: int) -> list[str]:
    """A row's lines."""
    before = " " * indent
    for cell, size in zip(cells, sizes, strict=False):
        before += f"{cell:{size}}  "
    room = max(width() - len(before), _NARROW)
    first, *others = wrapped(cells[-1], "", room) or [""]
    below = " " * len(before)
    return [(before + first).rstrip(), *(below + line for line in others)]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [markdown_row(heads), "|" + " --- |" * len(heads), *map(markdown_row, rows)]


def markdown_row(cells: Sequence[str]) -> str:
    """A line of it; a cell's text is neither HTML nor another cell."""
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |".replace("<", "&lt;").replace(">", "&gt;")
