"""Reading a Chrome trace: an object with ``traceEvents``, or a bare list of events."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.lab.json_text import parsed
from megatron_muon.lab.outputs import CommandError
from megatron_muon.mcore.checkpoint.files import open_regular

MOST = 1 << 31  # bytes of a trace's text, which takes about seven times as much memory
# Objects and lists in it. Empty ones take 24 times the memory of their text. A real
# trace of MOST bytes has about half as many.
MOST_PARTS = 1 << 27
_RANK = re.compile(r"rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)


class TraceError(CommandError):
    """A file is no trace that can be read; the text names the file."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace's events, whose times are floats, and its other values."""

    path: Path
    events: list[dict[str, Any]]
    metadata: dict[str, Any]


def read_trace(path: Path) -> TraceFile:
    """Read a trace, gzip or plain; a TraceError where the file is none, or damaged."""
    try:
        with open_regular(path) as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            text = (gzip.GzipFile(fileobj=file) if is_gzip else file).read(MOST + 1)
        if len(text) > MOST:
            raise ValueError(f"it has more than {MOST >> 20} MiB: trace fewer steps")
        if text.count(b"{") + text.count(b"[") > MOST_PARTS:
            raise ValueError(
                f"it has more than {MOST_PARTS:,} events and lists: trace fewer steps"
            )
        whole = parsed(text.decode("utf-8", "replace"))
        metadata = whole if isinstance(whole, dict) else {"traceEvents": whole}
        events = metadata.pop("traceEvents", None)
        if not isinstance(events, list):
            raise ValueError("it has no traceEvents, and it is no list of events")
        timed = [_timed(event, number) for number, event in enumerate(events)]
    except MemoryError:
        raise TraceError(
            f"{path}: it takes more memory than there is: trace fewer steps"
        ) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(f"{path}: it is no trace that can be read: {error}") from error
    return TraceFile(path, timed, metadata)


def _timed(event: Any, number: int) -> dict[str, Any]:
    if not isinstance(event, dict):
        raise ValueError(f"event {number} is no object but {str(event)[:40]!r}")
    for key in ("ts", "dur"):
        value = event.get(key) if key in event or event.get("ph") == "X" else 0
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) < 1e18
        ):
            raise ValueError(f"event {number}: {key} is {str(value)[:40]!r}")
        event |= {key: float(value)} if key in event else {}
    return event


def files_of(path: Path) -> list[Path]:
    """A file, or a folder's ``.json`` and ``.json.gz`` files; a TraceError where there
    are none.
    """
    if path.exists() and not path.is_dir():
        return [path]
    if not path.is_dir():
        raise TraceError(f"{path}: there is no such file or folder")
    files = sorted(
        each for each in path.iterdir() if each.name.endswith((".json", ".json.gz"))
    )
    files = [each for each in files if not each.name.startswith(".")]
    if not files:
        raise TraceError(
            f"{path}: there is no file in it that ends in .json or .json.gz"
        )
    return files


def rank_of(path: Path, metadata: Mapping[str, Any], otherwise: int) -> int:
    """The rank whose trace this is, by the trace, else by its file's name, else
    ``otherwise``.
    """
    world = metadata.get("distributedInfo")
    rank = world.get("rank") if isinstance(world, dict) else None
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 30:
        return rank
    named = _RANK.search(path.name)
    return int(named[1]) if named else otherwise
