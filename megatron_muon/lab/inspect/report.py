"""The report of ``megatron-muon checkpoint inspect``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_muon.lab.inspect.contents import RECORD, Contents
from megatron_muon.lab.inspect.folder import NoFolderError, located, read
from megatron_muon.lab.inspect.rows import StoredParameter, parameters
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
    "concept": "the proof of concept of Distributed Muon (Megatron-LM#1428)",
    "megatron": "Megatron's own Muon",
    "megatron_torch": "Megatron's own Muon",
    None: "a Megatron without megatron_muon",
}


@dataclass(slots=True)
class Report:
    """A checkpoint's contents and faults.

    Attributes:
        facts: facts by name, such as ``iteration``, in the order of printing.
        parameters: a row per parameter.
        bytes: bytes on disk by kind.
        notes: sentences on what is not known, and why.
        faults: reasons why the checkpoint is not complete; empty if it is.
    """

    facts: dict[str, str]
    parameters: list[StoredParameter] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def examine(path: Path, *, hashes: bool = False) -> Report:
    """Read a whole checkpoint.

    Args:
        hashes: also compare the hash of every file with the digest's.

    Raises:
        OSError: there is no checkpoint.
    """
    try:
        folder = located(path)
    except NoFolderError as error:
        return Report({"checkpoint": str(path)}, faults=[str(error)])
    said, faults = _digest(folder, hashes)
    unsealed = "no digest: that the files are as they were written is not known"
    notes = [] if said or faults else [unsealed]
    contents = read(folder)
    rows, wrong = parameters(contents, said["parameters"] if said else {})
    facts = {"checkpoint": str(folder)}
    facts |= contents.read("what it says of itself", lambda: _facts(folder, contents, said)) or {}
    return Report(facts, rows, _bytes(folder, contents), notes, [*faults, *contents.faults, *wrong])


def _digest(folder: Path, hashes: bool) -> tuple[digest.Digest | None, list[str]]:
    """The digest, or None if there is no usable one; and the faults in it and in its files."""
    try:
        said = digest.read(folder)
        if said is None:
            return None, ["there is no digest to hold hashes against"] if hashes else []
        digest.require_complete(folder, said)
    except digest.DigestError as error:
        return None, [str(error)]
    files, how = said["files"], checksum if hashes else None
    faults = (digest.fault(folder, name, entry, how) for name, entry in files.items())
    return said, [fault for fault in faults if fault]


def _facts(folder: Path, contents: Contents, said: digest.Digest | None) -> dict[str, str]:
    number = re.fullmatch(r"iter_(\d+)", folder.name)
    iteration = contents.common.get("iteration", int(number[1]) if number else "not known")
    records = [state[RECORD] for state in contents.states if RECORD in state]
    settings = said["settings"] if said else records[0]["settings"] if records else {}
    sharding = {str(state.get("param_state_sharding_type", "")) for state in contents.states}
    kinds = {stored.kind for stored in contents.stored.values()}
    whose = ["Muon"] * ("momentum" in kinds) + ["AdamW"] * ("adamw" in kinds)
    facts = {
        "iteration": str(iteration),
        "format": ", ".join([contents.format, *sorted(sharding - {""})]),
        "written by": _writer(folder, contents, said, settings),
        "optimizer": " and ".join(whose) or "no optimizer state",
    }
    if settings:
        facts["settings"] = ", ".join(f"{name} {_plain(settings[name])}" for name in settings)
    if said is not None:
        facts["digest"] = f"complete, {len(said['files'])} files"
    return facts


def _writer(
    folder: Path, contents: Contents, said: digest.Digest | None, settings: Mapping[str, Any]
) -> str:
    if said is not None:
        return ", ".join(f"{name} {value}" for name, value in said["wrote"].items())
    ranks = getattr(contents.common.get("args"), "world_size", None)
    on = f", on {ranks} ranks" if isinstance(ranks, int) else ""
    if settings:
        return f"megatron_muon{on}; its version is not in the checkpoint"
    files = [entry.name for entry in entries(folder) if entry.name.endswith(".pt")]
    return _WRITERS[writer_of(contents.keys, contents.states, files)] + on


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
