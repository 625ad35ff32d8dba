"""Tables of the lab: as wide as the terminal, or in Markdown for a report."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

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
        print("\n".join(wrapped(text)), file=to, flush=True)


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
        if (
            sum(sizes[own] + 2 for own in bands[-1]) + sizes[at] > width()
            and len(bands[-1]) > 1
        ):
            bands.append([0])
        bands[-1].append(at)
    lines: list[str] = []
    for band in bands:
        heads = [textwrap.wrap(rows[0][at], sizes[at]) for at in band]
        cells = list(itertools.zip_longest(*heads, fillvalue=""))
        below = ([row[at] for at in band] for row in rows[1:])
        cells += [tuple(row) for row in below if not set(row[1:]) <= {"", "-"}]
        lines += ["", *(_line(row, [sizes[at] for at in band]) for row in cells)]
    return lines[1:]


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    first, *others = (
        f"{cell:>{size}}" for cell, size in zip(cells, sizes, strict=True)
    )
    return "  ".join([cells[0].ljust(len(first)), *others]).rstrip()


def listed(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table of texts that fits the terminal: its last column breaks between
    words.

    Where that stays too narrow, the first one has a line of its own above the others.
    """
    return [line for row in _entries(rows, width()) for line in row]


def _entries(
    rows: Sequence[Sequence[str]], within: int, *, is_below: bool = False
) -> list[list[str]]:
    *sizes, last = (max(map(len, column)) for column in zip(*rows, strict=True))
    start = sum(size + 2 for size in sizes)
    if start + min(last, _NARROW) > within and len(sizes) > 1 and not is_below:
        below = _entries([row[1:] for row in rows], within - _INDENT, is_below=True)
        return [
            [row[0], *(" " * _INDENT + line for line in own)]
            for row, own in zip(rows, below, strict=True)
        ]
    entries = []
    for *cells, text in rows:
        before = "".join(
            f"{cell:{size}}  " for cell, size in zip(cells, sizes, strict=True)
        )
        lines = wrapped(text, "", max(within - start, _NARROW)) or [""]
        entries.append(
            [(before + lines[0]).rstrip(), *(" " * start + line for line in lines[1:])]
        )
    return entries


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [markdown_row(heads), "|" + " --- |" * len(heads), *map(markdown_row, rows)]


def markdown_row(cells: Sequence[str]) -> str:
    """A line of it; a cell's text is neither HTML nor another cell."""
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |".replace("<", "&lt;").replace(">", "&gt;")
