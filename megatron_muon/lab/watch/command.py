"""``megatron-muon watch``: what a run with ``--muon-log-interval`` has logged, and is logging."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_muon.files.printable import printable
from megatron_muon.lab.dry_run.numbers import positive
from megatron_muon.lab.plan.charts import require_chart
from megatron_muon.lab.watch.history import History
from megatron_muon.lab.watch.rules import LOGIT, Warning, warnings
from megatron_muon.lab.watch.view import as_text, damage_lines, step_line, warning_lines

_DESCRIPTION = """\
Show the lines that --muon-log-interval has written: the last step of every kind of matrix, the
outputs of the layers, and warnings, each with its heading on the troubleshooting page. A line that
is damaged is named and left out."""

_STATUS = """\
exit status:
  0  shown; warnings do not change it
  1  shown, but for damaged lines
  2  wrong arguments, no such file, or no step in it"""
_Draw = Callable[[History, Path], None]
_AT_ONCE = 1 << 20  # bytes read at once


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: its arguments.

    Returns:
        The exit status, as ``--help`` lists them; wrong arguments end the process with 2.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    if given.plot is not None and given.follow:
        parser.error("--plot draws what there is, and --follow does not end: give one of them")
    draw = _drawing(parser, given.plot)
    try:
        if given.follow:
            _follow(given.file, given.logit_threshold, given.seconds)
        history = _history(given.file)
        _show(as_text(str(given.file), history, warnings(history, given.logit_threshold)))
        if not history.steps:
            return 2
        if draw is not None:
            draw(history, given.plot)
            _show(f"\nwrote {given.plot}")
    except BrokenPipeError:  # the reader of the output is gone
        raise
    except OSError as error:
        print(f"{parser.prog}: error: {_printable(str(error))}", file=sys.stderr)
        return 2
    return 1 if history.fault_count else 0


def _history(path: Path) -> History:
    history = History()
    for data in _rest_of(path, 0):
        history.feed(data)
    history.end()
    return history


def _follow(path: Path, logit_threshold: float | None, seconds: float) -> None:
    """Show each new step until the command is stopped."""
    place, identity = 0, (-1, -1)
    history = History()
    shown: tuple[int, int] = (-1, 0)
    told: list[str] = []
    waits = False
    while True:
        try:
            status = os.stat(path)
        except FileNotFoundError:  # the run has not started to log
            if not waits:
                print(f"waiting for {_printable(str(path))}", file=sys.stderr, flush=True)
            waits = True
            time.sleep(seconds)
            continue
        if (status.st_dev, status.st_ino) != identity or status.st_size < place:
            history, place, identity = History(), 0, (status.st_dev, status.st_ino)
        for data in _rest_of(path, place):
            place += len(data)
            history.feed(data)
        now = (history.steps[-1].step if history.steps else -1, history.fault_count)
        if now != shown:
            told = _show_new(path, history, warnings(history, logit_threshold), told)
            shown = now
        time.sleep(seconds)


def _show_new(
    path: Path, history: History, current: Sequence[Warning], told: Sequence[str]
) -> list[str]:
    """The whole view on a terminal, else a line and the warnings that are new."""
    lines = [*warning_lines(current), *damage_lines(history)]
    if sys.stdout.isatty():
        print("\033[H\033[2J", end="")
        _show(as_text(str(path), history, current))
    else:
        new = [line for line in lines if line not in told]
        _show("\n".join([*([step_line(history)] if history.steps else []), *new]))
    return lines


def _rest_of(path: Path, start: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while data := file.read(_AT_ONCE):
            yield data


def _drawing(parser: argparse.ArgumentParser, path: Path | None) -> _Draw | None:
    """The function that draws; its module is imported only where it is asked for."""
    if path is None:
        return None
    try:
        require_chart("--plot", path)
    except ValueError as error:
        parser.error(str(error))
    from megatron_muon.lab.watch.picture import draw

    return draw


def _show(text: str) -> None:
    print(_printable(text), flush=True)


def _printable(text: str) -> str:
    """Escape control characters and those that the output's encoding lacks; keep line breaks."""
    encoding = sys.stdout.encoding or "utf-8"
    return printable(text, kept="\n").encode(encoding, "backslashreplace").decode(encoding)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-muon watch",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=_path,
        help="the run's --muon-log-file, muon_watch.jsonl by default",
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on with the file of a running job, until Ctrl-C"
    )
    parser.add_argument(
        "--plot", metavar="PNG", type=_path, help="draw layers by steps; needs matplotlib"
    )
    parser.add_argument(
        "--logit-threshold",
        type=positive,
        metavar="X",
        help=f"warn about attention logits above it; default: the run's QK-Clip's, else {LOGIT:g}",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=2.0,
        metavar="S",
        help="seconds between two looks at the file with --follow (%(default)s)",
    )
    return parser


def _path(text: str) -> Path:
    """A path. An empty text, which would mean the current folder, is refused."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    return Path(text)
