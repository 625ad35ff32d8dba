"""Parts of a digest: what a rank knows of the files that it wrote, until the digest is made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_muon.claim import Save
from megatron_muon.durable import write_text

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
    """What a rank left in this save, None where it left nothing."""
    try:
        return dict(json.loads((folder / _NAME.format(save=save["id"], rank=rank)).read_text()))
    except FileNotFoundError:
        return None


def read_parts(folder: Path, save: Save) -> Iterator[dict[str, Any]]:
    """What all ranks left in this save."""
    for path in sorted(folder.glob(_NAME.format(save=save["id"], rank="*"))):
        yield dict(json.loads(path.read_text()))
