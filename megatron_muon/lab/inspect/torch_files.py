"""Reading checkpoints in Megatron-LM's old format ``torch``: two files per model-parallel rank."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_muon.lab.inspect.tensors import (
    RECORD,
    Contents,
    add_buffers,
    by_name,
    items_of,
    state_dicts,
    within,
)
from megatron_muon.mcore.checkpoint import read

_FILE = re.compile(r"(model_optim_rng|model_optim|distrib_optim|model_rng)\.pt$")
_CHUNK = re.compile(r"model\d*")


def files_of(folder: Path) -> list[Path]:
    """The files of one iteration: in its folder, or in subfolders ``mp_rank_*``.

    Deeper folders are not searched, so a folder of several iterations has none.
    """
    every = [*folder.glob("*.pt"), *folder.glob("mp_rank_*/*.pt")]
    return sorted(file for file in every if _FILE.search(file.name))


def read_torch(folder: Path) -> Contents:
    """The contents of a checkpoint in ``torch``; parts that cannot be read are among its faults.

    Args:
        folder: the folder of one iteration.
    """
    contents = Contents("torch")
    for file in files_of(folder):
        within(str(file.relative_to(folder)), contents, partial(_add, contents, folder, file))
    return contents


def _add(contents: Contents, folder: Path, file: Path) -> None:
    name = str(file.relative_to(folder))
    has_tensors = "optim.pt" in file.name and "model" not in file.name
    saved = read.load(file)
    if has_tensors:
        _add_tensors(contents, saved, name)
    else:
        _add_model(contents, saved, name)
    pair = _pair(file) if has_tensors or _has_record(saved) else None
    if pair is not None and not pair[0]:
        contents.faults.append(f"{name} has no {pair[1]} beside it, which is missing")


def _add_tensors(contents: Contents, saved: Any, name: str) -> None:
    states = saved if isinstance(saved, list) else [saved]
    for number, state in enumerate(states):
        if isinstance(state, dict) and not any(isinstance(key, int) for key in state):
            if "buckets_coalesced" not in state:
                raise ValueError("it has no grad buffers, so it is no optimizer's file")
        add_buffers(contents, state, name if len(states) == 1 else f"{name} {number}", name)


def _add_model(contents: Contents, saved: Any, file: str) -> None:
    named = by_name(dict(items_of(saved, "all of it")))
    states = state_dicts(named.get("optimizer"))
    chunks = [key for key in named if _CHUNK.fullmatch(key)]
    if not chunks:
        raise ValueError("it has no model in it")
    if not contents.common:
        contents.common = {key: named[key] for key in named if not key.startswith("model")}
    contents.states += states
    for chunk in chunks:
        for name, tensor in by_name(dict(items_of(named[chunk], chunk))).items():
            if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
                part = f"{file} {chunk}"
                entry = contents.at("model", "weight", name, part, tensor.shape, tensor.dtype)
                entry.add(tensor, file)


def _pair(file: Path) -> tuple[bool, str]:
    """Whether the other one of a rank's two files is there; and its possible names."""
    name = file.name
    if "distrib_optim" in name:
        others = [
            name.replace("distrib_optim", what) for what in ("model_optim_rng", "model_optim")
        ]
    else:
        others = [re.sub("model_optim(_rng)?", "distrib_optim", name)]
    return any(file.with_name(other).is_file() for other in others), " or ".join(others)


def _has_record(saved: Any) -> bool:
    """Whether a rank saved it on which Muon's DistributedOptimizer has state."""
    return any(RECORD in state for state in state_dicts(saved.get("optimizer")))
