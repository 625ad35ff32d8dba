"""The report of ``megatron-muon checkpoint``: the digest, held against the files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.mcore.checkpoint.interop.saved import METADATA
from megatron_muon.megatron_lm import tracker


@dataclass(slots=True)
class Report:
    """A checkpoint's contents and faults."""

    facts: dict[str, str]  # facts by name, such as iteration, in the order of printing
    # Muon's matrices by weight: how many, by "ROWS x COLS"
    matrices: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # why it is not complete
    has_digest: bool = True


def examine(path: Path, *, hashes: bool = False) -> Report:
    """Read what the checkpoint in a folder of ``--save``, or of one iteration, says of
    itself.

    With ``hashes`` the hash of every file is compared with the digest's, not only its
    size.

    Raises:
        OSError: there is no checkpoint.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder")
    try:
        folder = _located(path)
        kept = manifest.complete(folder)
    except ValueError as error:  # a DigestError, too
        return Report({"checkpoint": str(path)}, faults=[str(error)])
    number = manifest.iteration_of(folder.name)
    facts = {
        "checkpoint": str(folder),
        "iteration": "not known" if number is None else str(number),
    }
    facts["format"] = "torch_dist" if (folder / METADATA).exists() else "torch"
    if kept is None:
        if not (folder / METADATA).exists() and not any(folder.glob("mp_rank_*/*.pt")):
            raise FileNotFoundError(
                f"{folder} has no checkpoint in it, and no {tracker.NAME}: give the "
                "folder of one iteration"
            )
        return Report(facts, has_digest=False)
    files = kept["files"]
    faults = [
        manifest.fault(folder, name, entry, hashes=hashes)
        for name, entry in files.items()
    ]
    record = kept["record"] or {"settings": {}}
    facts["written by"] = ", ".join(
        f"{name} {value}" for name, value in kept["wrote"].items()
    )
    facts["settings"] = ", ".join(
        f"{name} {_plain(v)}" for name, v in record["settings"].items()
    )
    facts["bytes"] = (
        f"{sum(entry['size'] for entry in files.values()):,} in {len(files)} files"
    )

    def natural(name: str) -> str:  # a key that puts layer 10 after layer 9
        return re.sub("[0-9]+", lambda number: number[0].zfill(20), name)

    matrices = record.get("matrices", {})
    rows = {name: matrices[name] for name in sorted(matrices, key=natural)}
    return Report(facts, rows, [fault for fault in faults if fault])


def _located(path: Path) -> Path:
    """The folder that a tracker file names, else ``path``; a ValueError if it is not
    there.
    """
    file = path / tracker.NAME
    if not file.exists():
        return path
    try:
        folder = path / str(tracker.named_by(path, manifest.last_complete))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    if not folder.is_dir():
        raise ValueError(f"{file} names {folder.name}, which is not there")
    return folder


def _plain(value: Any) -> str:
    return (
        " ".join(map(str, value)) or "none"
        if isinstance(value, (list, tuple))
        else str(value)
    )
