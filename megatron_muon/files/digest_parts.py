"""Parts of a digest: each rank's knowledge of the files that it wrote, until the digest is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.files.claim import Save
from megatron_muon.files.digest_text import MOST, completed
from megatron_muon.files.durable import write_text
from megatron_muon.files.regular import read_regular

_NAME = "megatron_muon.{save}.{rank}.part.json"


def write_part(folder: Path, save: Save, rank: int, part: Mapping[str, Any]) -> None:
    """Leave what a rank knows in the folder for the one that makes the digest.

    Args:
        folder: the checkpoint's.
        save: which save it is of: another's parts may lie beside.
        rank: in the world.
        part: JSON.

    Raises:
        OSError: it cannot be written.
    """
    write_text(folder / _NAME.format(save=save["id"], rank=rank), json.dumps(part))


def read_part(folder: Path, save: Save, rank: int) -> dict[str, Any] | None:
    """The part that a rank left in this save, None where it left none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written.
    """
    try:
        return _read(folder / _NAME.format(save=save["id"], rank=rank))
    except FileNotFoundError:
        return None


def read_parts(folder: Path, save: Save) -> Iterator[dict[str, Any]]:
    """The parts that all ranks left in this save.

    Raises:
        OSError: one cannot be read.
        ValueError: one is not what was written.
    """
    for path in sorted(folder.glob(_NAME.format(save=save["id"], rank="*"))):
        yield _read(path)


def _read(path: Path) -> dict[str, Any]:
    """A part whose ``files`` and ``parameters``, where it has them, are a digest's."""
    data = read_regular(path, MOST + 1)
    try:
        part = json.loads(data) if len(data) <= MOST else None
        if isinstance(part, dict):
            checked = completed(part)
            return {key: checked[key] for key in part}
    except (ValueError, RecursionError):  # the latter: it is nested ever so deeply
        pass
    raise ValueError(f"{path} is not what a rank of this save wrote: save again")
