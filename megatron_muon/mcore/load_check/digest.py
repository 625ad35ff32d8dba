"""The digest of a checkpoint, ``megatron_muon.json`` in its folder: writing, reading,
checking.

One JSON object:

==============  ================================================================================
``format``      2; keys may be added to it, since readers ignore keys that they do not know
``complete``    false from before the first file of a save until after the last
``wrote``       versions of ``megatron_muon``, ``megatron_core`` and ``torch``; ``world_size``
``save``        the save that wrote it: ``id``, random, and ``by``, who saved it
``optimizer``   ``muon``
``settings``    the fields of MuonConfig
``parameters``  by name, with layers and experts numbered over the whole model: ``shape``, the
                whole parameter's, and ``optimizer``: ``muon``, ``adamw`` or ``frozen``
``files``       by path in the folder: ``size`` in bytes and ``hash`` (see ``checksum``)
``hash``        BLAKE2b of all of the above
==============  ================================================================================

While ``complete`` is false the object is the mark of a save: it has only ``complete``,
``format``, ``wrote``, ``save`` and ``hash``. Beside it is ``megatron_muon.lock`` while
a save runs, locked by its rank 0. No other file in the folder is changed, moved or
removed, except temporary files of this package's earlier versions.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_muon.console import printable
from megatron_muon.mcore.load_check.files import open_regular, write_text
from megatron_muon.presence import MuonError

FILE_NAME = "megatron_muon.json"
LOCK_NAME = "megatron_muon.lock"
FORMAT = 2
MOST = 1 << 28  # bytes of a digest; a million parameters take about half of it
Digest = dict[str, Any]
Files = dict[str, dict[str, Any]]
Save = dict[str, Any]

# beside the digest itself
_OWN = re.compile(r"megatron_muon\..*(part\.json|tmp|lock|contested)")


class DigestError(MuonError, ValueError):
    """A checkpoint is not what its digest says, or not complete."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it quotes names from files


# --- writing --------------------------------------------------------------------------


def new_save() -> Save:
    """A save by this process: a random ``id``, and who saves; earlier versions read
    ``job``.
    """
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    return {
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": {},
        "began": began,
    }


def begin(folder: Path, wrote: Mapping[str, Any], save: Save | None = None) -> None:
    """Mark a folder as incomplete; makes it if it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"format": FORMAT, "complete": False, "wrote": wrote, "save": save}
    write_text(folder / FILE_NAME, with_hash(mark))
    for path in folder.glob("megatron_muon.*"):  # of a save that was killed
        if path.name not in (FILE_NAME, LOCK_NAME) and own_file(path.name):
            path.unlink(missing_ok=True)


def finish(folder: Path, content: Digest) -> None:
    """Mark a folder as complete; ``content`` has all other keys. Raises OSError."""
    write_text(
        folder / FILE_NAME,
        with_hash({"format": FORMAT, "complete": True, **content}),
    )


def with_hash(content: Digest) -> str:
    """A digest's text, with the hash of its content."""
    text = json.dumps(content, indent=1, sort_keys=True)
    whole = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps({**content, "hash": whole}, indent=1, sort_keys=True) + "\n"


def own_file(name: str) -> bool:
    """Whether a name in a checkpoint's folder is that of a file of this package."""
    return name == FILE_NAME or _OWN.fullmatch(name) is not None


# --- reading --------------------------------------------------------------------------


def read(folder: Path) -> Digest | None:
    """A folder's digest, None where it has none; DigestError if it cannot be read."""
    try:
        return _content(folder)
    except DigestError as error:
        raise DigestError(f"{error}. {way_out(folder)}") from error


def saver(folder: Path) -> Save | None:
    """The save that marked a folder last, if its mark names one."""
    with suppress(DigestError):
        return (_content(folder) or _DEFAULTS)["save"]  # type: ignore[no-any-return]
    return None


def _content(folder: Path) -> Digest | None:
    """``read`` without a way out in its errors."""
    path = folder / FILE_NAME
    try:
        with open_regular(path) as file:
            text = file.read(MOST).decode()
        content = json.loads(text)
        intact = (
            with_hash({key: content[key] for key in content if key != "hash"}) == text
        )
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DigestError(f"{path} is damaged: it is a link to nothing") from None
        return None
    except OSError as error:
        raise DigestError(f"{path} cannot be read ({error})") from error
    except (ValueError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise DigestError(f"{path} is damaged: it is not what was written")
    if content.get("format") != FORMAT:
        raise DigestError(
            f"{path} is of format {content.get('format')!r}, this megatron_muon reads "
            f"{FORMAT}: use the megatron_muon that wrote it, or load without the check "
            "(--no-muon-checkpoint-digest)"
        )
    whole = {**_DEFAULTS, **content, "settings": content.get("settings") or {}}
    if not _has_types(whole):
        raise DigestError(f"{path} is damaged: its values are not those of a digest")
    return whole


_DEFAULTS: Digest = {
    "complete": False,
    "wrote": {},
    "save": None,
    "parameters": {},
    "files": {},
}


def _has_types(whole: Digest) -> bool:
    """Whether all that readers use has its type: a hash is no protection against
    intent.
    """
    try:
        return (
            isinstance(whole["complete"], bool)
            and (whole["save"] is None or isinstance(whole["save"]["id"], str))
            and isinstance(whole["wrote"], dict)
            and isinstance(whole["settings"], dict)
            and all(map(_is_parameter, whole["parameters"].values()))
            and all(map(_is_file, whole["files"].values()))
            and all(map(_is_below, whole["files"]))
        )
    except (AttributeError, KeyError, TypeError):
        return False


def _is_parameter(entry: Any) -> bool:
    is_known = entry["optimizer"] in ("muon", "adamw", "frozen")
    shape = entry["shape"]
    return is_known and isinstance(shape, list) and all(map(_is_count, shape))


def _is_file(entry: Any) -> bool:
    return isinstance(entry["hash"], str) and _is_count(entry["size"])


def _is_below(name: str) -> bool:
    """Whether a path stays in its folder."""
    path = Path(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


# --- checking -------------------------------------------------------------------------


def complete(folder: Path) -> Digest | None:
    """``read``, which also refuses a folder whose save did not finish."""
    digest = read(folder)
    if digest is not None and not digest["complete"]:
        raise DigestError(
            f"{folder} is not complete: the save that wrote it "
            f"({saved_by(digest['save'])}) still runs or was stopped before its end. "
            f"{way_out(folder)}"
        )
    return digest


def saved_by(save: Save | None) -> str:
    """The host and process of a save, in words."""
    if save is None:
        return "by an earlier megatron_muon"
    host, pid, began = (save.get(key, "unknown") for key in ("host", "pid", "began"))
    return f"process {pid} on {host}, begun at {began} UTC"


def fault(
    folder: Path,
    name: str,
    entry: Mapping[str, Any],
    checksum: Callable[[Path], str] | None,
) -> str | None:
    """The fault of a checkpoint's file in words, if any; without ``checksum`` by its
    size only.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            text = f"has {size} bytes, {entry['size']} were written"
        elif checksum is not None and checksum(path) != entry["hash"]:
            text = f"is damaged: its {size} bytes are not those that were written"
        else:
            return None
        return f"{path} {text}{_later(folder, path)}"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        return f"{path} cannot be read ({error})"


def _later(folder: Path, path: Path) -> str:
    """Words for a file that is newer than the digest; else empty."""
    if path.stat().st_mtime_ns <= (folder / FILE_NAME).stat().st_mtime_ns:
        return ""
    return (
        "; it is newer than the digest: if a run without the plugin has saved over "
        f"this folder, remove its {FILE_NAME}, and it is loaded unchecked"
    )


# --- other checkpoints beside one -----------------------------------------------------


def last_complete(folder: Path, but: int | None = None) -> int | None:
    """The newest complete checkpoint ``iter_N`` in a folder, but for one; see
    ``says_complete``.
    """
    with suppress(OSError):
        found = {iteration_of(name): folder / name for name in os.listdir(folder)}
        for number in sorted(found.keys() - {None, but}, reverse=True):  # type: ignore[type-var]
            if says_complete(found[number]):
                return number
    return None


def iteration_of(name: str) -> int | None:
    """N of a folder's name ``iter_N`` as Megatron writes it; None for any other
    name.
    """
    digits = name.removeprefix("iter_")
    if not digits.isdecimal() or name != f"iter_{int(digits):07d}":
        return None
    return int(digits)


def says_complete(folder: Path) -> bool:
    """Whether a folder has a finished save's digest, and all files in their sizes."""
    with suppress(DigestError):
        content = _content(folder) or _DEFAULTS
        files: Files = content["files"]
        faults = (fault(folder, name, entry, None) for name, entry in files.items())
        return content["complete"] and not any(faults)
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
