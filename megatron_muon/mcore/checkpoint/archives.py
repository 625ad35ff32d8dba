"""The large records of the archives that torch.save writes, with their CRC-32s.

torch.save writes zip archives. Their directories have the CRC-32 of every record,
computed as the bytes went by. A shard of torch_dist is one such archive after another.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import BinaryIO, NamedTuple

LARGE = 4096  # bytes of a large record, at least
_SIGNATURE = b"PK\003\004"
_HEADER = struct.Struct("<26xHH")  # of a record: lengths of its name and extra field


class Record(NamedTuple):
    """Bytes ``[start, stop)`` of a file, and their CRC-32 in the archive's
    directory.
    """

    start: int
    stop: int
    crc: int


def large_records(file: BinaryIO, stop: int) -> list[Record]:
    """Large records of the archives at the end of a file's first ``stop`` bytes, in the
    order of places; none where it has no archives there.
    """
    records: list[Record] = []
    while stop and (archive := _archive(file, stop)):
        stop, more = archive
        records = more + records
    return records


def _archive(file: BinaryIO, stop: int) -> tuple[int, list[Record]] | None:
    """The start and the large records of the archive that ends at ``stop``; None for no
    archive.

    Records are used only where they can be: a damaged directory may say anything.
    """
    try:
        with zipfile.ZipFile(_Until(file, stop)) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError):
        return None
    if not entries or not 0 <= entries[0].header_offset < stop:
        return None
    records = []
    at = entries[0].header_offset
    for entry in entries:
        begin = entry.header_offset + _header(file, entry.header_offset)
        end = begin + entry.file_size
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        if not is_stored or entry.header_offset < at or end > stop:
            return None
        if entry.file_size >= LARGE:
            records.append(Record(begin, end, entry.CRC))
        at = end
    return entries[0].header_offset, records


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
