"""Parts of a digest: each rank's description of the files that it wrote, for the whole digest."""

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
    """Write a rank's part into the folder, for the rank that makes the digest.

    Args:
        folder: the checkpoint's folder.
        save: the save that it belongs to; parts of another save may be there, too.
        rank: world rank.
        part: JSON; keys that a digest has, too, have its types.

    Raises:
        OSError: it cannot be written.
    """
    write_text(folder / _NAME.format(save=save["id"], rank=rank), json.dumps(part))


def read_part(folder: Path, save: Save, rank: int) -> dict[str, Any] | None:
    """The part that a rank wrote in this save; None where it wrote none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what was written.
    """
    try:
        return _read(folder / _NAME.format(save=save["id"], rank=rank))
    except FileNotFoundError:
        return None


def read_parts(folder: Path, save: Save) -> Iterator[dict[str, Any]]:
    """The parts that all ranks wrote in this save.

    Raises:
        OSError: one cannot be read.
        ValueError: one is not what was written.
    """
    for path in sorted(folder.glob(_NAME.format(save=save["id"], rank="*"))):
        yield _read(path)


def _read(path: Path) -> dict[str, Any]:
    """A part, after a check that its keys have the types of a digest's."""
    data = read_regular(path, MOST + 1)
    try:
        part = json.loads(data) if len(data) <= MOST else None
        if isinstance(part, dict):
            checked = completed(part)
            return {key: checked[key] for key in part}
    except (ValueError, RecursionError):  # RecursionError: it is nested too deeply
        pass
    raise ValueError(f"{path} is not what a rank of this save wrote: save again")
