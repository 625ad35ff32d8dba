"""The measurements of a comparison on disk, so that a call that was ended goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_muon.files.durable import write_text
from megatron_muon.lab.compare.training import Job, Trained

_KINDS: dict[str, tuple[type, ...]] = {
    "losses": (list,),
    "step_ms": (float, int),
    "optimizer_ms": (float, int),
    "sent": (dict,),
    "state_bytes": (int,),
    "peak_bytes": (int,),
    "link_bytes": (int,),
}


def digest(job: Job, where: Mapping[str, str]) -> str:
    """A short hash of all that a measurement depends on.

    Args:
        job: the training.
        where: versions and machine.
    """
    row = job.row
    known = {
        "flags": {name: str(value) for name, value in sorted(vars(job.flags).items())},
        "row": [row.name, row.kind, str(row.config)],
        "job": [job.lr, job.steps, job.micro_batch, job.micro_batches, job.link_mbits],
        "where": dict(where),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def write(path: Path, known: str, ranks: Sequence[Trained]) -> None:
    """Write a training's measurements, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, json.dumps({"digest": known, "ranks": [asdict(each) for each in ranks]}))


def read(path: Path, known: str) -> list[Trained] | None:
    """The ranks that ``write`` wrote with the same digest; None where there is no such file."""
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return None  # what is damaged is measured again
    if not isinstance(stored, dict) or stored.get("digest") != known:
        return None
    ranks = stored.get("ranks")
    if not isinstance(ranks, list) or not all(_is_trained(each) for each in ranks):
        return None
    return [Trained(**each) for each in ranks]


def _is_trained(value: Any) -> bool:
    names = {field.name for field in fields(Trained)}
    return (
        isinstance(value, dict)
        and set(value) == names
        and all(isinstance(value[name], _KINDS[name]) for name in names)
    )
