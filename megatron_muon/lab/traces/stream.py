"""The events of a Chrome trace, one at a time: a file of any size takes the memory of one event.

Nothing read from a file is trusted. Whatever is wrong with it becomes a ``TraceError`` that names
it.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_muon.files.regular import open_regular

CHUNK = 1 << 18  # characters that are read at once
# The largest event, and the largest value outside the events: distributedInfo lists all groups.
MOST = 1 << 24
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"


class TraceError(ValueError):
    """A file is no trace that can be read; the text names the file."""


class TraceFile:
    """A Chrome trace: an object with ``traceEvents``, or a bare list of events; gzip or plain.

    Attributes:
        path: the file.
        metadata: the object's other values; complete once ``events`` has ended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}

    def events(self) -> Iterator[dict[str, Any]]:
        """The events in the order of the file.

        Raises:
            TraceError: the file cannot be read, is damaged or is no trace.
        """
        try:
            with open_regular(self.path) as file:
                start = file.read(2)
                file.seek(0)
                opened: Any = gzip.GzipFile(fileobj=file) if start == _GZIP else file
                yield from self._events(_Text(opened))
        except TraceError:
            raise
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{self.path}: it cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.path}: it is no trace: {error}") from error

    def _events(self, text: _Text) -> Iterator[dict[str, Any]]:
        first = text.take()
        if first == "[":
            yield from self._listed(text)
            return
        if not first:
            raise ValueError("it is empty")
        if first != "{":
            raise ValueError("it is neither an object with traceEvents nor a list of events")
        has_events = False
        if text.peek() == "}":
            text.take()
        else:
            for key in self._keys(text):
                if key != "traceEvents":
                    self.metadata[key] = text.value()
                elif has_events:
                    raise ValueError("traceEvents is in it twice")
                elif text.take() != "[":
                    raise ValueError("traceEvents is no list")
                else:
                    has_events = True
                    yield from self._listed(text)
        if text.peek():
            raise ValueError("there is more after its end")
        if not has_events:
            raise ValueError("there is no traceEvents in it")

    def _keys(self, text: _Text) -> Iterator[str]:
        """The keys of the object; the caller takes each one's value."""
        ends = ","
        while ends == ",":
            key = text.value()
            if not isinstance(key, str) or text.take() != ":":
                raise ValueError(f"{str(key)[:40]!r} is no key with a value")
            yield key
            ends = text.take()
        if ends != "}":
            _unexpected(ends, "the trace")

    def _listed(self, text: _Text) -> Iterator[dict[str, Any]]:
        if text.peek() == "]":
            text.take()
            return
        number, ends = 0, ","
        while ends == ",":
            event = text.value()
            if not isinstance(event, dict):
                raise ValueError(f"event {number} is no object but {str(event)[:40]!r}")
            yield event
            number += 1
            ends = text.take()
        if ends != "]":
            _unexpected(ends, "the list of events")


def _unexpected(character: str, inside: str) -> NoReturn:
    raise ValueError(f"{character!r} stands in {inside}" if character else f"{inside} has no end")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


class _Text:
    """The characters of a file, and JSON values from it; holds what is not taken yet."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._scan = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode
        self._held = ""
        self._at = 0
        self._ended = False

    def peek(self) -> str:
        """The next character that is no space, or "" at the end."""
        while True:
            while self._at < len(self._held):
                if self._held[self._at] not in _SPACE:
                    return self._held[self._at]
                self._at += 1
            if not self._read(CHUNK):
                return ""

    def take(self) -> str:
        """``peek``, and go on behind it."""
        character = self.peek()
        self._at += len(character)
        return character

    def value(self) -> Any:
        """The next JSON value.

        Raises:
            ValueError: it is none, ends before its end, or has more than ``MOST`` characters.
            RecursionError: it is nested too deeply.
        """
        self.peek()
        more = CHUNK
        while True:
            value, end = None, -1
            with contextlib.suppress(json.JSONDecodeError):
                value, end = self._scan(self._held, self._at)
            # a number at the end of what is held may go on
            if end >= 0 and (end < len(self._held) or self._ended):
                self._at = end
                return value
            if len(self._held) - self._at > MOST:
                raise ValueError(f"a value in it has more than {MOST} characters, or is no JSON")
            if not self._read(more):
                if end < 0:
                    raise ValueError(self._fault())
            more = min(2 * more, MOST)

    def _fault(self) -> str:
        try:
            self._scan(self._held, self._at)
        except json.JSONDecodeError as error:
            if self._held[error.pos :].strip() == "" or "Unterminated" in error.msg:
                return "it ends in the middle of a value"
            return f"{error.msg} at {self._held[error.pos : error.pos + 20]!r}"
        return "it ends in the middle of a value"

    def _read(self, size: int) -> bool:
        """Hold more; False at the end."""
        if self._ended:
            return False
        read = self._file.read(size)
        self._ended = not read
        self._held = self._held[self._at :] + self._decode(read, final=self._ended)
        self._at = 0
        return not self._ended
