"""Charts, where matplotlib is installed: one of the two modules that import it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def require_chart(option: str, path: Path) -> None:
    """Check that a chart can be written in the format that a file's name asks for.

    Args:
        option: the flag that names the file.
        path: the file; its suffix selects the format.

    Raises:
        ValueError: matplotlib is not installed, or it does not write that format.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib")
    formats = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            f"{option} {path}: its name must end in a format of matplotlib's, one of "
            f"{', '.join('.' + name for name in formats)}"
        )
