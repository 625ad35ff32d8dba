"""Reading a Chrome trace: an object with ``traceEvents``, or a bare list of events."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

from megatron_muon.lab.json_text import parsed
from megatron_muon.lab.outputs import CommandError
from megatron_muon.mcore.checkpoint.files import open_regular

MOST = 1 << 31  # bytes of a trace's text, which takes about seven times as much memory
# Objects and lists in it. Empty ones take 24 times the memory of their text. A real
# trace of MOST bytes has about half as many.
MOST_PARTS = 1 << 27


class TraceError(CommandError):
    """A file is no trace that can be read; the text names the file."""


def read_trace(path: Path) -> tuple[list[Any], int | None]:
    """A trace's events as they are, and its rank, where torch has written it.

    It is gzip or plain; a TraceError where the file is no trace, or damaged.
    """
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
        events = metadata.get("traceEvents")
        if not isinstance(events, list):
            raise ValueError("it has no traceEvents, and it is no list of events")
    except MemoryError:
        raise TraceError(
            f"{path}: it takes more memory than there is: trace fewer steps"
        ) from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise TraceError(f"{path}: it is no trace that can be read: {error}") from error
    world = metadata.get("distributedInfo")
    rank = world.get("rank") if isinstance(world, dict) else None
    return events, rank if type(rank) is int and 0 <= rank < 1 << 30 else None


def files_of(path: Path) -> list[Path]:
    """A file, or a folder's ``.json`` and ``.json.gz`` files; a TraceError where there
    are none.
    """
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise TraceError(
            f"{path}: there is no file in it that ends in .json or .json.gz"
        )
    return files
