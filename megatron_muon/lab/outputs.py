"""The files that a command writes at its end; they are checked before its work."""

from __future__ import annotations

import importlib.util
import json
import os
from argparse import (
    ArgumentParser,
    Namespace,
    RawDescriptionHelpFormatter,
    _ArgumentGroup,
)
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.console import printable, with_nearest


class CommandError(RuntimeError):
    """A command cannot do its work; the text is its one line for the user, with exit
    status 1.
    """


class _Parser(ArgumentParser):
    """Escapes control characters of what a user gave, which an error quotes, and names
    the flags that are nearest to an unknown one.
    """

    def error(self, message: str) -> NoReturn:
        named = with_nearest(message, self._option_string_actions)
        super().error(printable(named, kept="\n"))


def parser_of(program: str, description: str, **options: Any) -> ArgumentParser:
    """A command's parser, whose texts keep their lines; flags have no abbreviations."""
    options |= {"allow_abbrev": False, "formatter_class": RawDescriptionHelpFormatter}
    return _Parser(prog=program, description=description, **options)


def add_outputs(parser: ArgumentParser | _ArgumentGroup, plot: str = "") -> None:
    """Add ``--json``, and ``--plot`` where there is a picture, of what ``plot``
    says.
    """
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON, too")
    if plot:
        add("--plot", type=Path, metavar="FILE", help=f"draw {plot} (png, svg, pdf)")


def parsed(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """A command's arguments, with files of ``--json`` and ``--plot`` that can be
    written; else the process ends as argparse does.
    """
    args = parser.parse_args(argv)
    try:
        require_outputs(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def require_outputs(args: Namespace) -> None:
    """Check the files of ``--json`` and ``--plot``, write nothing; a ValueError for a
    bad one.
    """
    for name in ("json", "plot"):
        path = getattr(args, name, None)
        if path is not None:
            require_writable(f"--{name}", path)
            if name == "plot":
                _require_chart(path)


def require_writable(flag: str, path: Path) -> None:
    """Raise a ValueError with the flag where a file, which may exist, cannot be
    written.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder: give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(
            f"{flag} {path} cannot be written: give a file in a folder of yours"
        )


def _require_chart(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    formats = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(
            f"--plot {path}: its name must end in a format of matplotlib's, one of "
            f"{', '.join('.' + name for name in formats)}"
        )


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def write_json(path: Path | None, value: Any) -> None:
    """Write the file of ``--json``, where there is one; a CommandError if that
    fails.
    """
    if path is not None:
        try:
            path.write_text(json.dumps(value, indent=1) + "\n")
        except OSError as error:
            raise CommandError(f"--json {path}: {error.strerror or error}") from error
