"""The manifest of a checkpoint, ``megatron_muon.json`` in its folder: the digest.

One JSON object:

============  ==================================================================================
``format``    3; format 2, of 0.2.0, has settings and parameters in place of the record
``complete``  false from before the first file of a save until after the last
``wrote``     versions of ``megatron_muon``, ``megatron_core`` and ``torch``; ``world_size``
``record``    Muon's settings and matrices, as in its optimizer state (``param_groups.record``);
              null where no optimizer state was saved
``files``     by path in the folder: ``size`` in bytes and ``hash`` (see ``file_hash``)
``hash``      BLAKE2b of all of the above
============  ==================================================================================

While ``complete`` is false the object is the mark of a save: beside that, it has only
``format``, ``save``, a random text, and ``hash``. No other file in the folder is
changed, moved or removed.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron_muon.console import printable
from megatron_muon.mcore.checkpoint.archives import large_records
from megatron_muon.mcore.checkpoint.files import open_regular, write_text
from megatron_muon.mcore.checkpoint.matrices import require_record
from megatron_muon.presence import MuonError

FILE_NAME = "megatron_muon.json"
FORMAT = 3
_MOST = 1 << 28  # bytes of a manifest; that of a million files has about half of it
_CHUNK = 1 << 22  # bytes that are read at once
Manifest = dict[str, Any]


class DigestError(MuonError, ValueError):
    """A checkpoint is not what its digest says, or not complete."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it quotes names from files


# --- writing --------------------------------------------------------------------------


def begin(folder: Path) -> str:
    """Mark a folder, which is made if it is missing, as incomplete; the mark's text.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"format": FORMAT, "complete": False, "save": secrets.token_hex(8)}
    text = with_hash(mark)
    write_text(folder / FILE_NAME, text)
    return text


def finish(folder: Path, mark: str, content: Manifest) -> None:
    """Mark a folder as complete; ``content`` is ``wrote``, ``record`` and ``files``.

    Raises:
        RuntimeError: it has not the mark that ``begin`` has written. It is then marked
            anew, so that no other save that wrote there is completed.
        OSError: it cannot be read or written.
    """
    path = folder / FILE_NAME
    there = ""
    with suppress(FileNotFoundError):
        there = _text(path)
    if there != mark:
        write_text(path, mark)
        raise RuntimeError(
            f"{folder} may contain files of two saves, so it is not complete: during "
            f"this save another one has written, or somebody has removed, {path.name}. "
            "Let only one job save there, or give each a folder of its own"
        )
    write_text(path, with_hash({"format": FORMAT, "complete": True, **content}))


def with_hash(content: Manifest) -> str:
    """A manifest's text, with the hash of its content."""
    text = json.dumps(content, indent=1, sort_keys=True)
    whole = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "hash": whole}, indent=1, sort_keys=True) + "\n"


def is_own(name: str) -> bool:
    """Whether a file in a checkpoint's folder is of this package, in any version."""
    return name.startswith("megatron_muon.")


def entry(path: Path, *, written: bool) -> dict[str, Any]:
    """A file's entry in the manifest; see ``file_hash``."""
    return {"size": path.stat().st_size, "hash": file_hash(path, written=written)}


def file_hash(path: str | os.PathLike[str], *, written: bool = False) -> str:
    """``crc32+blake2b:`` and 32 hex digits for a file's bytes, the same on any machine.

    It is BLAKE2b over all bytes, but with the CRC-32 of each large record of torch's
    archives in place of the record. By chance a change of a record goes unseen once in
    2^32 times; one within 32 bits never does. It is no protection against intent.

    Args:
        written: take the CRC-32s from the archives' directories, and do not read the
            records: torch has just written them, nothing has changed them.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    whole = hashlib.blake2b(digest_size=16)
    with open_regular(path) as file:
        size = file.seek(0, io.SEEK_END)
        at = 0
        for start, stop, crc in large_records(file, size):
            for chunk in _chunks(file, at, start):
                whole.update(chunk)
            if not written:
                crc = 0
                for chunk in _chunks(file, start, stop):
                    crc = zlib.crc32(chunk, crc)
            whole.update(crc.to_bytes(4, "little"))
            at = stop
        for chunk in _chunks(file, at, size):
            whole.update(chunk)
    return f"crc32+blake2b:{whole.hexdigest()}"


def _chunks(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Bytes ``[start, stop)``, fewer if the file is shorter."""
    file.seek(start)
    for at in range(start, stop, _CHUNK):
        yield file.read(min(_CHUNK, stop - at))


# --- reading --------------------------------------------------------------------------


def complete(folder: Path) -> Manifest | None:
    """``read``, which also refuses a folder whose save did not finish; an error names
    the way out.
    """
    try:
        saved = read(folder)
        if saved is not None and not saved["complete"]:
            raise DigestError(
                f"{folder} is not complete: a save into it still runs, or was stopped "
                "before its end"
            )
        return saved
    except DigestError as error:
        raise DigestError(f"{error}. {way_out(folder)}") from error


def read(folder: Path) -> Manifest | None:
    """A folder's manifest, None where it has none; DigestError if it cannot be read."""
    path = folder / FILE_NAME
    try:
        text = _text(path)
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DigestError(f"{path} is damaged: it is a link to nothing") from None
        return None
    except OSError as error:
        raise DigestError(f"{path} cannot be read ({error})") from error
    try:
        content = json.loads(text)
        if with_hash({key: content[key] for key in content if key != "hash"}) != text:
            raise ValueError
        if content["format"] not in (2, FORMAT):
            raise DigestError(
                f"{path} is of format {content['format']!r}, this megatron_muon reads "
                f"{FORMAT}: use the megatron_muon that wrote it, or load without the "
                "check (--no-muon-checkpoint-digest)"
            )
        return _checked(content)
    except DigestError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise DigestError(f"{path} is damaged: it is not what was written") from None


def _text(path: Path) -> str:
    with open_regular(path) as file:
        return file.read(_MOST).decode("utf-8", "replace")


def _checked(content: Manifest) -> Manifest:
    """The content, of format 3, with all that readers use in its type: a hash is no
    protection against intent. Raises any of the errors of odd types.
    """
    whole = {"wrote": {}, "files": {}, "record": None, **content}
    if not isinstance(whole["complete"], bool) or not isinstance(whole["wrote"], dict):
        raise TypeError
    for name, entry in whole["files"].items():
        path = Path(name)
        is_below = path.parts and not path.is_absolute() and ".." not in path.parts
        is_count = type(entry["size"]) is int and 0 <= entry["size"] < 1 << 62
        if not is_below or not is_count or not isinstance(entry["hash"], str):
            raise ValueError
    if whole["record"] is not None:
        require_record(whole["record"])
    return whole


# --- checking -------------------------------------------------------------------------


def fault(
    folder: Path, name: str, entry: Mapping[str, Any], *, hashes: bool
) -> str | None:
    """The fault of a checkpoint's file in words, if any; without ``hashes`` by its size
    only.
    """
    path = folder / name
    try:
        there = path.stat()
        if there.st_size != entry["size"]:
            text = f"has {there.st_size} bytes, {entry['size']} were written"
        elif hashes and file_hash(path) != entry["hash"]:
            text = (
                f"is damaged: its {entry['size']} bytes are not those that were written"
            )
        else:
            return None
        if there.st_mtime_ns > (folder / FILE_NAME).stat().st_mtime_ns:
            text += (
                "; it is newer than the digest: if a run without the plugin has saved "
                f"over this folder, remove its {FILE_NAME}, and it is loaded unchecked"
            )
        return f"{path} {text}"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        return f"{path} cannot be read ({error})"


# --- other checkpoints beside one -----------------------------------------------------


def last_complete(folder: Path, but: int | None = None) -> int | None:
    """The newest complete checkpoint ``iter_N`` in a folder, but for one; see
    ``says_complete``.
    """
    with suppress(OSError):
        # to --ckpt-step 0 is none
        numbers = filter(None, map(iteration_of, os.listdir(folder)))
        for number in sorted(numbers, reverse=True):
            if number != but and says_complete(folder / f"iter_{number:07d}"):
                return number
    return None


def iteration_of(name: str) -> int | None:
    """N of a folder's name ``iter_N`` as Megatron writes it; None for any other
    name.
    """
    found = re.fullmatch("iter_([0-9]{7}|[1-9][0-9]{7,17})", name)
    return int(found[1]) if found else None


def says_complete(folder: Path) -> bool:
    """Whether a folder has a finished save's manifest, and all files in their sizes."""
    with suppress(DigestError):
        saved = read(folder)
        if saved is not None and saved["complete"]:
            files = saved["files"].items()
            return not any(fault(folder, *file, hashes=False) for file in files)
    return False


def way_out(folder: Path) -> str:
    """A sentence that names the way out where a checkpoint cannot be loaded; raises
    nothing.
    """
    number = iteration_of(folder.name)
    if number is None:
        return "Load another checkpoint"
    other = last_complete(folder.parent, number)
    if other is not None:
        return (
            f"The last complete one beside it is {other}: --ckpt-step {other} loads it"
        )
    return (
        f"{folder.parent} has no other checkpoint that is known to be complete. "
        f"Without {folder / FILE_NAME} this one is loaded unchecked"
    )
