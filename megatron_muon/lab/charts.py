"""Charts, where matplotlib is installed, and the check of what a command will write."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_muon.lab.writable import require_writable


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def require_outputs(given: Namespace) -> None:
    """Check the files of ``--json`` and ``--plot``, before a command's work; write nothing.

    Args:
        given: a command's arguments; ``json`` and ``plot`` are paths, or None.

    Raises:
        ValueError: a file cannot be written, or no chart in its format.
    """
    for name in ("json", "plot"):
        path = getattr(given, name)
        if path is not None:
            require_writable(f"--{name}", path)
    if given.plot is not None:
        require_chart("--plot", given.plot)


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
