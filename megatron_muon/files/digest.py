"""The digest of a checkpoint: ``megatron_muon.json`` in its folder, and what is wrong with it.

One JSON object:

==============  ================================================================================
``format``      2; keys may be added to it, which readers pass over that do not know them
``complete``    false from before the first file of a save until after the last
``wrote``       versions of ``megatron_muon``, ``megatron_core`` and ``torch``; ``world_size``
``save``        which save wrote it: see ``claim.identity``
``optimizer``   ``muon``
``settings``    of MuonConfig
``vocabulary``  number of tokens before padding, where it is known
``model``       settings of the model that its parameters' shapes do not tell, by name
``parameters``  by name, with layers and experts numbered over the whole model: ``shape``, the
                whole parameter's, and ``optimizer``: ``muon``, ``adamw`` or ``frozen``
``files``       by path in the folder: ``size`` in bytes, ``hash`` (``checksum``), and ``holds``,
                some names of parameters in it, where no file of the checkpoint's says which
``hash``        BLAKE2b of all of the above
==============  ================================================================================

While ``complete`` is false there is nothing but it, ``format``, ``wrote`` and ``save``: the mark of
a save. Two saves into one folder leave a mark with ``other``, the one that was noticed, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.files import claim
from megatron_muon.files.claim import LOCK_NAME, Save, described
from megatron_muon.files.digest_text import MOST, completed, opened, printable, sealed
from megatron_muon.files.durable import write_text
from megatron_muon.files.regular import NotRegularError, open_regular

FILE_NAME = "megatron_muon.json"
FORMAT = 2
Digest = dict[str, Any]
Files = dict[str, dict[str, Any]]
Checksum = Callable[[Path], str]

_ITERATION = re.compile(r"iter_([0-9]{7,})")
_OWN = re.compile(r"megatron_muon\..*(part\.json|tmp|lock|contested)")  # beside the digest itself


_CONTESTED = "megatron_muon.{save}.contested"  # what another save leaves for that one


class DigestError(ValueError):
    """A checkpoint is not what its digest says, or not complete."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))  # it quotes names from files


class TwoSavesError(RuntimeError):
    """Another save into the same folder is going on, or has begun during this one."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


# --- the digest of a save ------------------------------------------------------------------------


def begin(folder: Path, wrote: Mapping[str, Any], save: Save | None = None) -> None:
    """Mark a folder as incomplete; it is made where it is not there.

    Args:
        folder: the checkpoint's.
        wrote: the same as in the digest.
        save: which save this is, for ``other_save``.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"format": FORMAT, "complete": False, "wrote": wrote, "save": save}
    write_text(folder / FILE_NAME, sealed(mark))
    _clear(folder, LOCK_NAME)  # what a save that was killed has left


def finish(folder: Path, content: Mapping[str, Any]) -> None:
    """Mark it as complete.

    Args:
        folder: the one that ``begin`` was called with; every file is there.
        content: all but ``format``, ``complete`` and ``hash``.

    Raises:
        OSError: it cannot be written.
    """
    write_text(folder / FILE_NAME, sealed({"format": FORMAT, "complete": True, **content}))
    _clear(folder, *(path.name for path in folder.glob(_CONTESTED.format(save="*"))))


def contest(folder: Path, save: Save, other: Save | None) -> None:
    """Mark it as what two saves have written into at once, so that neither makes it complete.

    Raises:
        OSError: it cannot be written.
    """
    if other is not None:  # it may be about to write its digest over this mark
        write_text(folder / _CONTESTED.format(save=other["id"]), json.dumps(save))
    mark = {"format": FORMAT, "complete": False, "wrote": {}, "save": save, "other": other}
    write_text(folder / FILE_NAME, sealed(mark))


def other_save(folder: Path, save: Save) -> str | None:
    """Words for another save that has written here since ``begin``; None while the mark is ours."""
    content, problem = _content(folder)
    if content is None:
        return problem or f"its mark, {FILE_NAME}, was removed"
    theirs = content["save"]
    if theirs is None or theirs["id"] != save["id"]:
        return f"another save began there: {described(theirs)}"
    if content["other"] is not None:
        return f"another save began there: {described(content['other'])}"
    contested = contester(folder, save)
    if contested is None:
        return None
    return f"another save has written there, too: {described(contested)}"


def contester(folder: Path, save: Save) -> Save | None:
    """The save that has left word for this one that it has written into the folder, too."""
    return claim.read(folder / _CONTESTED.format(save=save["id"]))


def saver(folder: Path) -> Save | None:
    """Which save has marked a folder last, where its mark says so."""
    content, _ = _content(folder)
    return None if content is None else content["save"]


def unfinished(folder: Path) -> Save | None:
    """The save whose mark is there and that has not come to its end; None for none."""
    content, _ = _content(folder)
    return None if content is None or content["complete"] else content["save"]


def _clear(folder: Path, *kept: str) -> None:
    for path in folder.glob("megatron_muon.*"):
        if path.name not in (FILE_NAME, *kept) and own_file(path.name):
            path.unlink(missing_ok=True)


def read(folder: Path) -> Digest | None:
    """A folder's digest, None where it has none.

    Raises:
        DigestError: it is damaged, of another format, or cannot be read.
    """
    content, problem = _content(folder)
    if problem:
        raise DigestError(f"{problem}. {way_out(folder)}")
    return content


def _content(folder: Path) -> tuple[Digest | None, str]:
    """The digest or None, and what is wrong with it; nothing is where there is none.

    It asks nothing of other folders, so that ``way_out`` may ask it of all of them.
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
    """Refuse a folder whose save did not come to its end.

    Raises:
        DigestError: with the way out.
    """
    if digest["complete"]:
        return
    if digest["other"] is not None:
        raise DigestError(
            f"{folder} is not complete: two saves wrote into it at once, that of "
            f"{described(digest['save'])}, and that of {described(digest['other'])}. "
            f"{way_out(folder)}"
        )
    if digest["save"] is not None:
        raise DigestError(
            f"{folder} is not complete: the save that wrote it goes on or was stopped before its "
            f"end, that of {described(digest['save'])}. {way_out(folder)}"
        )
    raise DigestError(
        f"{folder} is not complete: the save that wrote it was stopped before its end. "
        f"{way_out(folder)}"
    )


def describe(path: Path, checksum: Checksum) -> dict[str, Any]:
    """``size`` and ``hash`` of a file."""
    return {"size": path.stat().st_size, "hash": checksum(path)}


def fault(folder: Path, name: str, entry: Mapping[str, Any], checksum: Checksum) -> str | None:
    """The fault of a checkpoint's file, None where it has none.

    Args:
        folder: the checkpoint's.
        name: the file's name in it.
        entry: the file's entry in ``files``.
        checksum: see ``describe``.
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
    except (OSError, ValueError) as error:  # the latter: no file has such a name
        return f"{path} cannot be read ({error})"
    return None


def _later(folder: Path, path: Path) -> str:
    """Words for a file that differs from the digest and is newer; empty where it is older."""
    digest = folder / FILE_NAME
    if path.stat().st_mtime_ns <= digest.stat().st_mtime_ns:
        return ""
    return (
        f"; it is newer than {FILE_NAME}: a run that makes no digest, such as AdamW's without the "
        "plugin, has saved over this folder, or the file alone was changed. In the former case "
        f"remove {digest}, and what is there now loads unchecked"
    )


def shared_out(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names for each of ``count`` ranks, with about as many bytes each; the same everywhere."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name] + 1
    return shares


def own_file(name: str) -> bool:
    """A file of this package's, so none of the checkpoint's."""
    return name == FILE_NAME or _OWN.fullmatch(name) is not None


# --- other checkpoints beside one ----------------------------------------------------------------


def complete_iterations(folder: Path) -> list[int]:
    """Numbers of the complete checkpoints ``iter_N`` in a folder, that have a digest; the last
    one last. No file is hashed."""
    return sorted(number for number, path in _iterations(folder) if says_complete(path))


def damaged_iterations(folder: Path) -> list[int]:
    """Numbers of those ``iter_N`` that have a digest that cannot be read."""
    return sorted(number for number, path in _iterations(folder) if _content(path)[1])


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
    """The number N of a folder's name ``iter_N``, as Megatron writes it; None for another name."""
    match = _ITERATION.fullmatch(name)
    if match is None or name != f"iter_{int(match[1]):07d}":
        return None
    return int(match[1])


def says_complete(folder: Path) -> bool:
    """Whether a folder has an intact digest of a save that came to its end, and all files in the
    sizes that it says. No file is hashed."""
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
    """The way out where a checkpoint cannot be loaded: a sentence. It raises nothing."""
    number = iteration_of(folder.name)
    if number is None:
        return "Load another checkpoint"
    others = [other for other in complete_iterations(folder.parent) if other != number]
    if not others:
        return f"{folder.parent} has no other checkpoint that is known to be complete"
    return f"The last complete one beside it is {others[-1]}: --ckpt-step {others[-1]} loads it"


def first_names(names: Iterable[str], most: int = 3) -> str:
    """Some of the names, and how many more there are: ``a, b, c and 9 more``; "" for none."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
