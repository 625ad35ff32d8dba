"""The digest of a checkpoint: ``megatron_muon.json`` in its folder, and what is wrong with it.

One JSON object:

==============  ================================================================================
``format``      2
``complete``    false from before the first file of a save until after the last
``wrote``       versions of ``megatron_muon``, ``megatron_core`` and ``torch``; ``world_size``
``optimizer``   ``muon``
``settings``    of MuonConfig
``vocabulary``  number of tokens before padding, where it is known
``parameters``  by name, with layers and experts numbered over the whole model: ``shape``, the
                whole parameter's, and ``optimizer``: ``muon``, ``adamw`` or ``frozen``
``files``       by path in the folder: ``size`` in bytes, ``hash`` (``checksum``), and ``holds``,
                some names of parameters in it, where no file of the checkpoint's says which
``hash``        BLAKE2b of all of the above
==============  ================================================================================

While ``complete`` is false there is nothing but it, ``format`` and ``wrote``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "megatron_muon.json"
FORMAT = 2
Digest = dict[str, Any]
Files = dict[str, dict[str, Any]]
Checksum = Callable[[Path], str]

_ITERATION = re.compile(r"iter_(\d+)$")
_PART = "megatron_muon.{rank}.part.json"


class DigestError(ValueError):
    """A checkpoint is not what its digest says, or not complete."""


def begin(folder: Path, wrote: Mapping[str, Any]) -> None:
    """Mark a folder as incomplete; it is made where it is not there.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE_NAME, _sealed({"format": FORMAT, "complete": False, "wrote": wrote}))
    _clear(folder)  # what a save that was killed has left


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    """Mark it as complete.

    Args:
        folder: that ``begin`` was called with; every file is there.
        content: all but ``format``, ``complete`` and ``hash``.

    Raises:
        OSError: it cannot be written.
    """
    write_text(folder / FILE_NAME, _sealed({"format": FORMAT, "complete": True, **content}))
    _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.glob("megatron_muon.*"):
        if path.name != FILE_NAME and own_file(path.name):
            path.unlink()


def read(folder: Path) -> Digest | None:
    """A folder's digest, None where it has none.

    Raises:
        DigestError: it is damaged or of another format.
    """
    path = folder / FILE_NAME
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        text = ""
    try:
        found = json.loads(text)
        intact = _sealed({key: found[key] for key in found if key != "hash"}) == text
    except (ValueError, TypeError):
        found, intact = {}, False
    if not intact:
        raise DigestError(f"{path} is damaged: it is not what was written. {way_out(folder)}")
    if found["format"] != FORMAT:
        raise DigestError(
            f"{path} is of format {found['format']!r}, this megatron_muon reads {FORMAT}: use the "
            "megatron_muon that wrote it, or load without the check (--no-muon-checkpoint-digest)"
        )
    return dict(found)


def require_complete(folder: Path, digest: Digest) -> None:
    """Refuse a folder whose save did not come to its end.

    Raises:
        DigestError: with the way out.
    """
    if not digest["complete"]:
        raise DigestError(
            f"{folder} is not complete: the save that wrote it was stopped before its end. "
            f"{way_out(folder)}"
        )


def describe(path: Path, checksum: Checksum) -> dict[str, Any]:
    """``size`` and ``hash`` of a file."""
    return {"size": path.stat().st_size, "hash": checksum(path)}


def fault(folder: Path, name: str, entry: Mapping[str, Any], checksum: Checksum) -> str | None:
    """What is wrong with a file of a checkpoint, None where nothing is.

    Args:
        folder: the checkpoint's.
        name: of the file in it.
        entry: of it in ``files``.
        checksum: as in ``describe``.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{path} has {size} bytes, {entry['size']} were written"
        if checksum(path) != entry["hash"]:
            return f"{path} is damaged: its {size} bytes are not those that were written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read ({error})"
    return None


def shared_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names for each of ``count`` ranks, with about as many bytes each; the same everywhere."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return shares


# --- parts: what a rank knows of the files that it wrote, until the digest is made ---------------


def write_part(folder: Path, rank: int, part: Mapping[str, Any]) -> None:
    """Leave what a rank knows in the folder for the one that makes the digest."""
    write_text(folder / _PART.format(rank=rank), json.dumps(part))


def read_part(folder: Path, rank: int) -> dict[str, Any] | None:
    """What a rank left, None where it left nothing."""
    try:
        return dict(json.loads((folder / _PART.format(rank=rank)).read_text()))
    except FileNotFoundError:
        return None


def read_parts(folder: Path) -> Iterator[dict[str, Any]]:
    """What all ranks left."""
    for path in sorted(folder.glob(_PART.format(rank="*"))):
        yield dict(json.loads(path.read_text()))


def own_file(name: str) -> bool:
    """A file of this module's, so none of the checkpoint's."""
    return name == FILE_NAME or re.fullmatch(r"megatron_muon\..*(part\.json|tmp)", name) is not None


# --- other checkpoints beside one ----------------------------------------------------------------


def complete_iterations(folder: Path) -> list[int]:
    """Numbers of the complete checkpoints ``iter_N`` in a folder, that have a digest; the last
    one last. No file is hashed."""
    found = []
    for path in folder.glob("iter_*"):
        number = _ITERATION.match(path.name)
        if number and says_complete(path):
            found.append(int(number[1]))
    return sorted(found)


def says_complete(folder: Path) -> bool:
    """Whether a folder has an intact digest of a save that came to its end. No file is hashed."""
    try:
        digest = read(folder)
    except (DigestError, OSError):
        return False
    return digest is not None and bool(digest["complete"])


def way_out(folder: Path) -> str:
    """What to do where a checkpoint cannot be loaded: a sentence."""
    if not _ITERATION.match(folder.name):
        return "Load another checkpoint"
    others = complete_iterations(folder.parent)
    others = [number for number in others if number != int(folder.name.removeprefix("iter_"))]
    if not others:
        return f"{folder.parent} has no other checkpoint that is known to be complete"
    return f"The last complete one beside it is {others[-1]}: --ckpt-step {others[-1]} loads it"


# --- files -----------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there with all its text or as it was before, whenever it ends.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.tmp")  # one process writes it
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """So that the new name outlasts a loss of power; not every file system lets a folder."""
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)


def _sealed(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, indent=1, sort_keys=True)
    whole = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "hash": whole}, indent=1, sort_keys=True) + "\n"


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Some of the names, and how many more there are: ``a, b, c and 9 more``; "" for none."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
