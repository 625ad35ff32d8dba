"""Save and load with the digest, and spoil what was saved. The functions run on
ranks.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_muon import MuonConfig
from support.checkpoints import saving
from support.installed import installed
from support.models.gpt import Built, Case, Topology, held, start, stepped
from support.ranks import error_of


def plugin(built: Built, **settings: Any) -> AbstractContextManager[None]:
    """The hooks are in place, as they are in a run."""
    return installed(MuonConfig(**{**dict(built.case.muon), **settings}))


def save(built: Built, folder: str | Path, format: str) -> None:
    """As Megatron-LM does with the plugin."""
    with plugin(built):
        if format != "torch":
            saving.save(built, folder, format)
            return
        from megatron_muon.mcore.checkpoint.seal import sealed

        write = partial(saving.save, built, folder, format)  # ends with a barrier
        sealed(write, str(folder), built.optimizer.record)


def load(built: Built, folder: str | Path, format: str) -> None:
    """As Megatron-LM does with the plugin."""
    from megatron_muon.mcore.checkpoint.seal import check

    with plugin(built):
        if format == "torch":
            check(str(folder), built.optimizer.record)
        saving.load(built, folder, format)


def saved(
    case: Case, topology: Topology, format: str, folder: str | Path
) -> dict[str, Any]:
    """Save a run that has taken the case's steps; what it holds."""
    built = stepped(case, topology)
    save(built, folder, format)
    return held(built)


def loaded(
    case: Case, topology: Topology, format: str, folder: str | Path
) -> dict[str, Any]:
    """What this rank holds after loading into a new run, and what that raises, as
    text.
    """
    built = start(case, topology)
    saving.spoil(built)
    error = _error_of_load(built, folder, format)
    return {"error": error} if error else {"error": None, "held": held(built)}


def errors_of_loads(
    case: Case, topology: Topology, format: str, folders: list[str] | list[Path]
) -> list[str | None]:
    """What loading each of them into one run raises."""
    built = start(case, topology)
    return [_error_of_load(built, folder, format) for folder in folders]


def _error_of_load(built: Built, folder: str | Path, format: str) -> str | None:
    error = error_of(lambda: load(built, folder, format))
    return None if error == "no error" else error


# --- what is done to files ------------------------------------------------------------


@dataclass(frozen=True)
class Corruption:
    """What was done to a checkpoint: ``kind`` to ``files``, paths in its folder."""

    kind: str
    files: tuple[str, ...]


KINDS = ("flip", "truncate", "delete", "swap", "zero")


def corrupt(folder: Path, seed: int) -> Corruption:
    """Do one random thing to the files of a checkpoint."""
    choice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    every = [path for path in every if path.name != "megatron_muon.json"]
    large = [path for path in every if path.stat().st_size > 1000]
    path = choice.choice(every if kind == "delete" else large)
    content = bytearray(path.read_bytes())
    names = [str(path.relative_to(folder))]
    if kind == "delete":
        path.unlink()
        return Corruption(kind, tuple(names))
    if kind == "swap":
        others = [other for other in large if other.read_bytes() != content]
        other = choice.choice(others)
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return Corruption(kind, (*names, str(other.relative_to(folder))))
    at = choice.randrange(len(content))
    if kind == "flip":
        content[at] ^= 1 << choice.randrange(8)
    elif kind == "truncate":
        del content[at:]
    else:
        at = max(i for i in range(len(content)) if content[i] and i <= max(at, 600))
        content[at : at + 512] = bytes(len(content[at : at + 512]))
    path.write_bytes(content)
    return Corruption(kind, tuple(names))
