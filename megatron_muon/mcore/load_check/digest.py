"""The digest of a checkpoint, ``megatron_muon.json`` in its folder: writing, reading, checking.

One JSON object:

==============  ================================================================================
``format``      2; keys may be added to it, since readers ignore keys that they do not know
``complete``    false from before the first file of a save until after the last
``wrote``       versions of ``megatron_muon``, ``megatron_core`` and ``torch``; ``world_size``
``save``        the save that wrote it: see ``new_save``
``optimizer``   ``muon``
``settings``    the fields of MuonConfig
``vocabulary``  number of tokens before padding, where it is known
``model``       by name, settings of the model that its parameters' shapes do not show
``parameters``  by name, with layers and experts numbered over the whole model: ``shape``, the
                whole parameter's, and ``optimizer``: ``muon``, ``adamw`` or ``frozen``; of Muon's
                with several projections ``split``, the kind in MuonConfig.splits
``files``       by path in the folder: ``size`` in bytes, ``hash`` (``checksum``), and ``holds``,
                names of some parameters in it, if no file of the checkpoint lists them
``hash``        BLAKE2b of all of the above
==============  ================================================================================

While ``complete`` is false the object is the mark of a save: it has only ``complete``, ``format``,
``wrote``, ``save`` and ``hash``. No other file of the folder is changed, moved or removed, except
for what earlier versions of this package left there under names of their own.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.console import printable
from megatron_muon.mcore.load_check.digest_text import MOST, completed, opened, sealed
from megatron_muon.mcore.load_check.durable import write_text
from megatron_muon.mcore.load_check.regular_files import NotRegularError, open_regular

FILE_NAME = "megatron_muon.json"
FORMAT = 2
Digest = dict[str, Any]
Files = dict[str, dict[str, Any]]
Save = dict[str, Any]
Checksum = Callable[[Path], str]

_ITERATION = re.compile(r"iter_([0-9]{7,})")
_OWN = re.compile(r"megatron_muon\..*(part\.json|tmp|lock|contested)")  # beside the digest itself
# Environment variables that identify a job.
_JOB = (
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID", "JOB_ID"),
    *("KUBERNETES_POD_NAME", "POD_NAME", "TORCHELASTIC_RUN_ID"),
)


class DigestError(ValueError):
    """A checkpoint is not what its digest says, or not complete."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it quotes names from files


# --- the digest of a save ------------------------------------------------------------------------


def new_save() -> Save:
    """A save by this process: ``id``, random; ``host``, ``pid``, ``job`` and ``began``, UTC."""
    return {
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": {name: os.environ[name] for name in _JOB if os.environ.get(name)},
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def described(save: Save | None) -> str:
    """A save in words; None where a mark has none."""
    if save is None:
        return "a run that left no name"
    job = "".join(f", {name} {value}" for name, value in save["job"].items())
    return f"process {save['pid']} on {save['host']}{job}, which began at {save['began']} UTC"


def begin(folder: Path, wrote: Mapping[str, Any], save: Save | None = None) -> None:
    """Mark a folder as incomplete; make it if it is missing.

    Args:
        folder: the checkpoint's folder.
        wrote: ``wrote`` of the digest.
        save: see ``new_save``.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"format": FORMAT, "complete": False, "wrote": wrote, "save": save}
    write_text(folder / FILE_NAME, sealed(mark))
    for path in folder.glob("megatron_muon.*"):  # left by a killed save
        if path.name != FILE_NAME and own_file(path.name):
            path.unlink(missing_ok=True)


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    """Mark a folder as complete.

    Args:
        folder: the folder of ``begin``, with all files.
        content: the digest without ``format``, ``complete`` and ``hash``.

    Raises:
        OSError: it cannot be written.
    """
    write_text(folder / FILE_NAME, sealed({"format": FORMAT, "complete": True, **content}))


def saver(folder: Path) -> Save | None:
    """The save that marked a folder last, if its mark names one."""
    content, _ = _content(folder)
    return None if content is None else content["save"]


def read(folder: Path) -> Digest | None:
    """A folder's digest; None where it has none.

    Raises:
        DigestError: it is damaged, of another format, or cannot be read.
    """
    content, problem = _content(folder)
    if problem:
        raise DigestError(f"{problem}. {way_out(folder)}")
    return content


def _content(folder: Path) -> tuple[Digest | None, str]:
    """The digest or None, and the fault of its file in words; ``""`` if it has none or is missing.

    It reads no other folder, so that ``way_out`` may call it for every one.
    """
    path = folder / FILE_NAME
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST:
                return None, f"{path} is damaged: it has {size} bytes, at most {MOST} can be"
            content = opened(file.read().decode())
        if content.get("format") != FORMAT:
            return None, (
                f"{path} is of format {content.get('format')!r}, this megatron_muon reads {FORMAT}:"
                " use the megatron_muon that wrote it, or load without the check "
                "(--no-muon-checkpoint-digest)"
            )
        return completed(content), ""
    except (FileNotFoundError, NotADirectoryError):
        return None, f"{path} is damaged: it is a link to nothing" if path.is_symlink() else ""
    except NotRegularError:
        return None, f"{path} is damaged: it is no file"
    except OSError as error:
        return None, f"{path} cannot be read ({error})"
    except ValueError as error:
        return None, f"{path} is damaged: {error}"


def require_complete(folder: Path, digest: Digest) -> None:
    """Refuse a folder whose save did not finish.

    Raises:
        DigestError: the save did not finish; names the way out.
    """
    if digest["complete"]:
        return
    by = f", that of {described(digest['save'])}" if digest["save"] is not None else ""
    raise DigestError(
        f"{folder} is not complete: the save that wrote it goes on or was stopped before its end"
        f"{by}. {way_out(folder)}"
    )


def describe(path: Path, checksum: Checksum) -> dict[str, Any]:
    """``size`` and ``hash`` of a file."""
    return {"size": path.stat().st_size, "hash": checksum(path)}


def fault(folder: Path, name: str, entry: Mapping[str, Any], checksum: Checksum) -> str | None:
    """The fault of a checkpoint's file in words; None where it has none.

    Args:
        folder: the checkpoint's folder.
        name: the file's path in the folder.
        entry: the file's entry in ``files``.
        checksum: function from a path to a checksum.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            later = _later(folder, path)
            return f"{path} has {size} bytes, {entry['size']} were written{later}"
        if checksum(path) != entry["hash"]:
            later = _later(folder, path)
            return f"{path} is damaged: its {size} bytes are not those that were written{later}"
    except FileNotFoundError:
        return f"{path} is missing"
    except (OSError, ValueError) as error:  # ValueError: no file can have such a name
        return f"{path} cannot be read ({error})"
    return None


def _later(folder: Path, path: Path) -> str:
    """Words for a file that differs from the digest, if it is newer; else empty."""
    digest = folder / FILE_NAME
    if path.stat().st_mtime_ns <= digest.stat().st_mtime_ns:
        return ""
    return (
        f"; it is newer than {FILE_NAME}: a run that makes no digest, such as AdamW's without the "
        "plugin, has saved over this folder, or the file alone was changed. In the former case "
        f"remove {digest}, and what is there now loads unchecked"
    )


def shared_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names of files for each of ``count`` ranks, of about equal bytes; the same on all ranks."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return shares


def own_file(name: str) -> bool:
    """Whether a name in a checkpoint's folder is that of a file of this package."""
    return name == FILE_NAME or _OWN.fullmatch(name) is not None


# --- other checkpoints beside one ----------------------------------------------------------------


def complete_iterations(folder: Path) -> list[int]:
    """Numbers of the complete checkpoints ``iter_N`` in a folder, sorted; see ``says_complete``."""
    return sorted(number for number, path in _iterations(folder) if says_complete(path))


def _iterations(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        number = iteration_of(name)
        if number is not None:
            yield number, folder / name


def iteration_of(name: str) -> int | None:
    """N of a folder's name ``iter_N`` as Megatron writes it; None for any other name."""
    match = _ITERATION.fullmatch(name)
    if match is None or name != f"iter_{int(match[1]):07d}":
        return None
    return int(match[1])


def says_complete(folder: Path) -> bool:
    """Whether a folder has an intact digest of a finished save, and all files in their sizes.

    No file is hashed.
    """
    content, _ = _content(folder)
    if content is None or not content["complete"]:
        return False
    files: Files = content["files"]
    return all(_size(folder / name) == entry["size"] for name, entry in files.items())


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def way_out(folder: Path) -> str:
    """A sentence that names the way out where a checkpoint cannot be loaded; raises nothing."""
    number = iteration_of(folder.name)
    if number is None:
        return "Load another checkpoint"
    others = [other for other in complete_iterations(folder.parent) if other != number]
    if not others:
        return (
            f"{folder.parent} has no other checkpoint that is known to be complete. Without "
            f"{folder / FILE_NAME} this one is loaded unchecked"
        )
    return f"The last complete one beside it is {others[-1]}: --ckpt-step {others[-1]} loads it"


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Some of the names, and how many more there are: ``a, b, c and 9 more``; "" for none."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
