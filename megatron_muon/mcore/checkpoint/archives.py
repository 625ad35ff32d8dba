"""The large records of the archives that torch.save writes, with their CRC-32s.

torch.save writes zip archives. Their directories have the CRC-32 of every record,
computed as the bytes went by. A shard of torch_dist is one such archive after another.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import BinaryIO

LARGE = 4096  # bytes of a large record, at least
_HEADER = struct.Struct("<26xHH")  # of a record: lengths of its name and extra field
Record = tuple[int, int, int]  # its start and stop, and the CRC-32 in the directory


def large_records(file: BinaryIO, stop: int) -> list[Record]:
    """Large records of the archives at the end of a file's first ``stop`` bytes, in the
    order of places; none where it has no archives there.
    """
    records: list[Record] = []
    while stop:
        try:
            stop, before = _last_archive(file, stop)
        except OSError:
            raise
        except Exception:  # there is no list of what a damaged directory raises
            break
        records = before + records
    return records


def _last_archive(file: BinaryIO, stop: int) -> tuple[int, list[Record]]:
    """The start and the large records of the archive that ends at ``stop``; an error if
    there is none.

    Its directory may be damaged and say anything: large records must be whole, and one
    after another.
    """
    with zipfile.ZipFile(_Until(file, stop)) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    records = []
    at = 0
    for entry in entries:
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        if not is_stored or not at <= entry.header_offset < stop:
            raise ValueError("torch.save writes no such archive")
        if entry.file_size >= LARGE:
            file.seek(entry.header_offset)
            lengths = _HEADER.unpack(file.read(_HEADER.size))
            begin = entry.header_offset + _HEADER.size + sum(lengths)
            at = begin + entry.file_size
            records.append((begin, at, entry.CRC))
    if at > stop:
        raise ValueError("a record ends after its archive")
    return entries[0].header_offset, records


class _Until(io.FileIO):
    """A file up to ``stop``, for zipfile."""

    def __init__(self, file: BinaryIO, stop: int) -> None:
        super().__init__(file.fileno(), closefd=False)
        self._stop = stop

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = self._stop + offset if whence == io.SEEK_END else offset
        if place < 0:  # the file is too short, or its directory damaged
            raise ValueError(f"a place before the file's start: {place}")
        return super().seek(place)

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._stop - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))
