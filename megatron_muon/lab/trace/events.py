"""The events of a Chrome trace, one at a time: a file of any size takes the memory of a few."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_muon.lab.json_text import parsed, scan
from megatron_muon.lab.outputs import CommandError
from megatron_muon.mcore.load_check.regular_files import open_regular

CHUNK = 1 << 18  # characters that are read at once, if they do not end within an event
MOST = 1 << 24  # characters of an event, and of all that is before or after the events
_RANK = re.compile(r"rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_LIST = re.compile(r'\A\s*\[|"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


class TraceError(CommandError):
    """A file is no trace that can be read; the text names the file."""


class TraceFile:
    """A Chrome trace: an object with ``traceEvents``, or a bare list of events; gzip or plain.

    ``metadata`` is the object's other values; it is complete once ``events`` has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """The events in the order of the file; their times are floats.

        Raises:
            TraceError: the file cannot be read, is damaged or is no trace.
        """
        try:
            with open_regular(self.path) as file:
                is_gzip = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                opened: Any = gzip.GzipFile(fileobj=file) if is_gzip else file
                text = io.TextIOWrapper(opened, "utf-8", "replace", newline="")
                for number, event in enumerate(self._events(text)):
                    yield _timed(event, number)
        except json.JSONDecodeError as error:
            raise TraceError(f"{self.path}: it is damaged or cut off: {error.msg}") from error
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}: it is no trace that can be read: {error}") from error

    def _events(self, text: TextIO) -> Iterator[Any]:
        held = more = text.read(CHUNK)
        while (opens := _LIST.search(held)) is None:
            if not more or len(held) > MOST:
                raise ValueError("it has no traceEvents, and it is no list of events")
            more = text.read(len(held))
            held += more
        head, at = held[: opens.end()], opens.end()
        while held[(at := _BETWEEN.match(held, at).end()) : at + 1] != "]":  # type: ignore[union-attr]
            try:
                event, at = scan(held, at)
                yield event
            except json.JSONDecodeError:
                if len(held) - at > MOST:
                    raise ValueError(f"an event has more than {MOST} characters") from None
                if not (more := text.read(len(held) - at + CHUNK)):
                    raise
                held, at = held[at:] + more, 0
        rest = head + held[at:] + text.read(MOST)  # what is longer ends as damaged
        whole = parsed(rest)
        self.metadata = whole if isinstance(whole, dict) else {}


def _timed(event: Any, number: int) -> dict[str, Any]:
    if not isinstance(event, dict):
        raise ValueError(f"event {number} is no object but {str(event)[:40]!r}")
    for key in ("ts", "dur"):
        value = event.get(key) if key in event or event.get("ph") == "X" else 0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
            raise ValueError(f"event {number}: {key} is {str(value)[:40]!r}")
        event |= {key: float(value)} if key in event else {}
    return event


def files_of(path: Path) -> list[Path]:
    """The traces of a run: a file, or the ``.json`` and ``.json.gz`` files of a folder.

    Raises:
        TraceError: there is no such file, or the folder has none.
    """
    if path.exists() and not path.is_dir():
        return [path]
    if not path.is_dir():
        raise TraceError(f"{path}: there is no such file or folder")
    files = sorted(each for each in path.iterdir() if each.name.endswith((".json", ".json.gz")))
    files = [each for each in files if not each.name.startswith(".")]
    if not files:
        raise TraceError(f"{path}: there is no file in it that ends in .json or .json.gz")
    return files


def rank_of(path: Path, metadata: Mapping[str, Any], otherwise: int) -> int:
    """The rank whose trace this is, by the trace, else by its file's name, else ``otherwise``."""
    told = metadata.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 30:
        return rank
    named = _RANK.search(path.name)
    return int(named[1]) if named else otherwise
