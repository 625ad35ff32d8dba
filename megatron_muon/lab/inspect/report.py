"""The report of ``megatron-muon checkpoint inspect``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.lab.inspect.folder import located, read
from megatron_muon.lab.inspect.rows import StoredParameter, parameters
from megatron_muon.lab.inspect.tensors import RECORD, Contents, are_settings
from megatron_muon.mcore.checkpoint.interop.foreign import writer_of
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.checksum import checksum
from megatron_muon.mcore.load_check.regular_files import entries

_KINDS = {
    "model": "model",
    "main": "main parameters",
    "momentum": "momentum",
    "adamw": "AdamW's moments",
}
_WRITERS = {
    "moonshot": "Moonshot's proof of concept (Megatron-LM pull request 1428)",
    "megatron": "Megatron's own Muon",
    "megatron_torch": "Megatron's own Muon",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A checkpoint's contents and faults.

    Attributes:
        facts: facts by name, such as ``iteration``, in the order of printing.
        parameters: a row per parameter.
        bytes: bytes on disk by kind.
        notes: sentences on what could not be told, and why.
        faults: reasons why the checkpoint is not complete; empty if it is.
    """

    facts: dict[str, str]
    parameters: tuple[StoredParameter, ...]
    bytes: dict[str, int]
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def examine(path: Path, *, hashes: bool = False) -> Report:
    """Read a whole checkpoint.

    Args:
        path: a folder with a tracker file, or one iteration's folder.
        hashes: also compare the hash of every file with the digest's.

    Raises:
        OSError: there is no checkpoint, or nothing says which one is meant.
    """
    place = located(path)
    folder, faults, notes = place.folder, [*place.faults], [*place.notes]
    if not place.is_there:
        return Report({"checkpoint": str(folder)}, (), {}, (), tuple(faults))
    said, wrong = _digest(folder, hashes)
    faults += wrong
    if said is None and not wrong:
        notes.append("no digest: that the files are as they were written is not known")
    contents = read(folder)
    settings = _settings(contents, said)
    rows = parameters(contents, (said or {}).get("parameters", {}))
    return Report(
        facts=_facts(folder, contents, said, settings),
        parameters=rows.rows,
        bytes=_bytes(folder, contents),
        notes=(*notes, *rows.notes),
        faults=(*faults, *contents.faults, *rows.faults),
    )


def _digest(folder: Path, hashes: bool) -> tuple[digest.Digest | None, list[str]]:
    """The digest, or None if there is no usable one; and the faults in it and in its files."""
    try:
        said = digest.read(folder)
        if said is None:
            return None, ["there is no digest to hold hashes against"] if hashes else []
        digest.require_complete(folder, said)
    except digest.DigestError as error:
        return None, [str(error)]
    if wrong := _unlikely(said):
        file = folder / digest.FILE_NAME
        return None, [f"{file} is not what megatron_muon writes: {wrong}"]
    faults = (_fault(folder, name, entry, hashes) for name, entry in said["files"].items())
    return said, [fault for fault in faults if fault]


def _unlikely(said: Mapping[str, Any]) -> str | None:
    """A fault that makes a digest's values unusable, or None: its file may contain anything."""
    if not are_settings(said["wrote"]) or not are_settings(said["settings"] or {}):
        return "settings, or versions, that are no plain values"
    for name, entry in said["parameters"].items():
        if any(size >= 1 << 62 for size in entry["shape"]) or len(entry["shape"]) > 64:
            return f"the shape of {name[:100]!r}"
        if entry["optimizer"] not in ("muon", "adamw", "frozen"):
            return f"the optimizer of {name[:100]!r}, {entry['optimizer'][:100]!r}"
    return None


def _fault(folder: Path, name: str, entry: Mapping[str, Any], hashes: bool) -> str | None:
    path = folder / name
    if path.exists() and not path.is_file():
        return f"{path} is no regular file"
    return digest.fault(folder, name, entry, checksum if hashes else lambda _: str(entry["hash"]))


def _settings(contents: Contents, said: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if said is not None:
        settings: Mapping[str, Any] | None = said["settings"]
        return settings
    records = [state[RECORD] for state in contents.states if isinstance(state.get(RECORD), dict)]
    return records[0]["settings"] if records else None


def _facts(
    folder: Path,
    contents: Contents,
    said: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
) -> dict[str, str]:
    number = re.fullmatch(r"iter_(\d+)", folder.name)
    iteration = contents.common.get("iteration")
    if not isinstance(iteration, int):
        iteration = int(number[1]) if number else "not known"
    facts = {
        "checkpoint": str(folder),
        "iteration": str(iteration),
        "format": ", ".join([contents.format, *sorted(contents.sharding)]),
        "written by": _writer(folder, contents, said, settings),
        "optimizer": _optimizer(contents),
    }
    if settings is not None:
        facts["settings"] = ", ".join(f"{name} {_plain(settings[name])}" for name in settings)
    if said is not None:
        facts["digest"] = f"complete, {len(said['files'])} files"
    return facts


def _writer(
    folder: Path,
    contents: Contents,
    said: Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None,
) -> str:
    ranks = getattr(contents.common.get("args"), "world_size", None)
    on = f", on {ranks} ranks" if isinstance(ranks, int) else ""
    if said is not None:
        return ", ".join(f"{name} {value}" for name, value in said["wrote"].items())
    if settings is not None:
        return f"megatron_muon{on}; its version is not in the checkpoint"
    files = [entry.name for entry in entries(folder) if entry.name.endswith(".pt")]
    foreign = writer_of(contents.keys, contents.states, files)
    if foreign is not None:
        return _WRITERS[foreign] + on
    return f"a Megatron without megatron_muon{on}"


def _optimizer(contents: Contents) -> str:
    kinds = {stored.kind for stored in contents.stored.values()}
    whose = ["Muon"] * ("momentum" in kinds) + ["AdamW"] * ("adamw" in kinds)
    return " and ".join(whose) or "no optimizer state"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)


def _bytes(folder: Path, contents: Contents) -> dict[str, int]:
    """Bytes of the tensors of each kind, of everything else in the files, and in total."""
    sizes = dict.fromkeys(_KINDS.values(), 0)
    for stored in contents.stored.values():
        sizes[_KINDS[stored.kind]] += stored.numel * stored.dtype.itemsize
    total = sum(entry.stat().st_size for entry in entries(folder) if _is_file(entry))
    return {**sizes, "all else": total - sum(sizes.values()), "total": total}


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads back to itself
        return False
