"""The checksum of a checkpoint's file. A save reuses the CRC-32s that torch already
computed.

torch.save writes zip archives. Their directories have the CRC-32 of every record,
computed as the bytes went by; a shard of torch_dist is one such archive after another.
The checksum of a file is BLAKE2b over all its bytes, but with the CRC-32 of each large
record in place of the record. Right after a save these come from the directories
(``written``), so large records are not read. Before a load they are computed from the
bytes.

By chance a change of a record goes unseen once in 2^32 times; one within 32 bits never
does. A file that is no archive, or changed into none, is hashed whole. This is no
protection against intent.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from megatron_muon.mcore.load_check.files import open_regular

NAME = "crc32+blake2b"  # prefix of every checksum
LARGE = 4096  # bytes; a record of this size or more is hashed as its CRC-32
_CHUNK = 1 << 22  # bytes that are read at once
_SIGNATURE = b"PK\003\004"
_HEADER = struct.Struct("<26xHH")  # of a record: lengths of its name and extra field


class _Record(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and their CRC-32 in the archive's
    directory.
    """

    start: int
    stop: int
    crc: int


def checksum(path: str | os.PathLike[str], *, written: bool = False) -> str:
    """``crc32+blake2b:`` and 32 hex digits for a file's bytes, the same on any machine.

    Args:
        written: whether to trust its CRC-32s: torch has just written it, nothing has
            changed it.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    whole = hashlib.blake2b(digest_size=16)
    with open_regular(path, buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        at = 0
        for record in _large_records(file, size):
            for chunk in _chunks(file, at, record.start):
                whole.update(chunk)
            crc = record.crc
            if not written:
                crc = 0
                for chunk in _chunks(file, record.start, record.stop):
                    crc = zlib.crc32(chunk, crc)
            whole.update(crc.to_bytes(4, "little"))
            at = record.stop
        for chunk in _chunks(file, at, size):
            whole.update(chunk)
    return f"{NAME}:{whole.hexdigest()}"


def _chunks(file: BinaryIO, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes ``[start, stop)``, fewer if the file is shorter. A chunk is valid until the
    next.
    """
    buffer = bytearray(min(_CHUNK, max(0, stop - start)))
    while start < stop:
        file.seek(start)
        count = file.readinto(memoryview(buffer)[: stop - start])  # type: ignore[attr-defined]
        if not count:
            return
        yield memoryview(buffer)[:count]
        start += count


def _large_records(file: BinaryIO, stop: int) -> list[_Record]:
    """Large records of the archives at the end of a file's first ``stop`` bytes, in the
    order of places; may be none.
    """
    records: list[_Record] = []
    while stop and (archive := _archive(file, stop)):
        stop, more = archive
        records = more + records
    return records


def _archive(file: BinaryIO, stop: int) -> tuple[int, list[_Record]] | None:
    """The start and the large records of the archive that ends at ``stop``; None for no
    archive.

    A directory is used only if its entries are possible: a damaged one may say
    anything.
    """
    try:
        with zipfile.ZipFile(_Until(file, stop)) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            comment = archive.comment
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError):
        return None
    if comment or not entries:
        return None
    records = []
    at = start = entries[0].header_offset
    for entry in entries:
        begin = entry.header_offset + _header(file, entry.header_offset)
        end = begin + entry.file_size
        stored = (
            entry.compress_type == zipfile.ZIP_STORED and begin > entry.header_offset
        )
        if entry.header_offset < at or not stored or end > stop:
            return None
        if entry.file_size >= LARGE:
            records.append(_Record(begin, end, entry.CRC))
        at = end
    return (start, records) if 0 <= start < stop else None


def _header(file: BinaryIO, at: int) -> int:
    """The number of bytes of a record's header; 0 where there is none."""
    file.seek(max(0, at))
    fixed = file.read(_HEADER.size)
    if at < 0 or len(fixed) < _HEADER.size or not fixed.startswith(_SIGNATURE):
        return 0
    return int(_HEADER.size + sum(_HEADER.unpack(fixed)))


class _Until(io.FileIO):
    """A file up to ``stop``, for zipfile."""

    def __init__(self, file: BinaryIO, stop: int) -> None:
        super().__init__(file.fileno(), closefd=False)
        self._stop = stop

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset, whence = self._stop + offset, io.SEEK_SET
        # the file is too short, or its directory damaged
        if whence == io.SEEK_SET and offset < 0:
            raise ValueError(f"a place before the file's start: {offset}")
        return super().seek(offset, whence)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._stop - self.tell())
        return (
            super().read(left if size is None or size < 0 else min(size, left)) or b""
        )
