"""Tables of the lab: aligned for a terminal, or in Markdown for a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: bool = False) -> list[str]:
    """Lines of a table, the first row its heads.

    Args:
        rows: cells; all rows have equally many.
        left: whether all columns stand to the left; else only the first one does.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:{width}}" if left or at == 0 else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    return [markdown_row(heads), "|" + " --- |" * len(heads), *map(markdown_row, rows)]


def markdown_row(cells: Sequence[str]) -> str:
    """A line of it; a cell's text is neither HTML nor another cell."""
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |".replace("<", "&lt;").replace(">", "&gt;")
