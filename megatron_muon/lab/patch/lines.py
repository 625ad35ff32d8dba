"""Putting a patch that only adds lines into a file's bytes, and taking it out again.

All other bytes stay: line ends, encoding, a last line without an end. ``git apply`` would be the
shorter way, but it refuses a file whose lines end in CRLF, as a checkout on Windows has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

State = Literal["patched", "not patched"]

_HEADER = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@.*")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_OURS = b"megatron_muon"


class PatchError(RuntimeError):
    """The patch can be neither put in nor taken out; the message says why."""


@dataclass(frozen=True, slots=True)
class Addition:
    """A unified diff of one hunk that adds lines after others.

    Attributes:
        file: path of the changed file, relative to the checkout, with slashes.
        context: lines before the added ones, without their line ends.
        added: added lines, without their line ends.
    """

    file: str
    context: tuple[bytes, ...]
    added: tuple[bytes, ...]


def parse(diff: str) -> Addition:
    """Parse a unified diff of one hunk that has context lines, then added lines.

    Raises:
        ValueError: the diff has another form.
    """
    head, _, body = diff.partition("@@")
    file = re.search(r"^\+\+\+ b/(\S+)$", head, re.MULTILINE)
    header, *lines = f"@@{body}".splitlines()
    signs = "".join(line[:1] for line in lines)
    if file is None or not _HEADER.fullmatch(header) or not re.fullmatch(r" +\++", signs):
        raise ValueError(f"no patch of one hunk that adds lines after others:\n{diff}")
    texts = [line[1:].encode() for line in lines]
    split = signs.count(" ")
    return Addition(file[1], tuple(texts[:split]), tuple(texts[split:]))


def state(data: bytes, patch: Addition) -> State:
    """Whether the file has the patch's lines, or else the one place for them.

    Args:
        data: the file's bytes.
        patch: the patch to look for.

    Raises:
        PatchError: neither: the context lines, or the patch's own, are not as expected.
    """
    bare = [_bare(line) for line in _LINE.findall(data)]
    places = _places(bare, patch.added)
    ours = [number for number, line in enumerate(bare) if _OURS in line]
    inside = [n for place in places for n in range(place, place + len(patch.added))]
    strangers = [str(number + 1) for number in ours if number not in inside]
    if strangers or len(places) > 1:
        where = ", ".join(strangers or [str(place + 1) for place in places])
        raise PatchError(
            f"{patch.file} has other lines about {_OURS.decode()} than the patch's (line {where}): "
            "take them out, or put the patch's lines back as they were"
        )
    if places:
        return "patched"
    _place(bare, patch)
    return "not patched"


def apply(data: bytes, patch: Addition) -> bytes:
    """The file's bytes with the added lines, which get the line end of the line before them.

    Raises:
        PatchError: see ``state``.
    """
    if state(data, patch) == "patched":
        return data
    lines = _LINE.findall(data)
    after = _place([_bare(line) for line in lines], patch) + len(patch.context)
    end = _end(lines[after - 1]) or _end(lines[after - 2]) or b"\n"
    added = [line + end for line in patch.added]
    if not _end(lines[after - 1]):  # the file's last line has no end: the new last one gets none
        lines[after - 1] += end
        added[-1] = patch.added[-1]
    return b"".join([*lines[:after], *added, *lines[after:]])


def revert(data: bytes, patch: Addition) -> bytes:
    """The file's bytes without the added lines.

    Raises:
        PatchError: see ``state``.
    """
    if state(data, patch) == "not patched":
        return data
    lines = _LINE.findall(data)
    (start,) = _places([_bare(line) for line in lines], patch.added)
    stop = start + len(patch.added)
    if start and not _end(lines[stop - 1]):
        lines[start - 1] = _bare(lines[start - 1])
    return b"".join([*lines[:start], *lines[stop:]])


def _place(bare: list[bytes], patch: Addition) -> int:
    places = _places(bare, patch.context)
    if len(places) == 1:
        return places[0]
    wanted = b"\n".join(patch.context).decode().strip()
    raise PatchError(
        f"{patch.file} has the line `{wanted}`, which the patch follows, "
        f"{len(places)} times, not once"
    )


def _places(bare: list[bytes], wanted: tuple[bytes, ...]) -> list[int]:
    count = len(wanted)
    return [n for n in range(len(bare) - count + 1) if tuple(bare[n : n + count]) == wanted]


def _bare(line: bytes) -> bytes:
    return line.removesuffix(b"\r\n").removesuffix(b"\n")


def _end(line: bytes) -> bytes:
    return line[len(_bare(line)) :]
