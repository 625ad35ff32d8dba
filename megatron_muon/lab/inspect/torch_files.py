"""Reading checkpoints in Megatron-LM's old format ``torch``: two files per model-parallel rank."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_muon.lab.inspect.contents import RECORD, Contents
from megatron_muon.mcore.checkpoint.interop.foreign import states_of
from megatron_muon.mcore.checkpoint.read import load

_FILE = re.compile(r"(model_optim_rng|model_optim|distrib_optim|model_rng)\.pt$")
_CHUNK = re.compile(r"model\d*")


def files_of(folder: Path) -> list[Path]:
    """The files of one iteration: in its folder, or in subfolders ``mp_rank_*``.

    Deeper folders are not searched, so a folder of several iterations has none.
    """
    every = [*folder.glob("*.pt"), *folder.glob("mp_rank_*/*.pt")]
    return sorted(file for file in every if _FILE.search(file.name))


def read_torch(folder: Path) -> Contents:
    """The contents of a checkpoint; parts that cannot be read are among its faults."""
    contents = Contents(folder, "torch")
    for file in files_of(folder):
        contents.read(str(file.relative_to(folder)), partial(_add, contents, file))
    return contents


def _add(contents: Contents, file: Path) -> None:
    name, saved = str(file.relative_to(contents.folder)), load(file)
    if "distrib_optim" in file.name:
        states = saved if isinstance(saved, list) else [saved]
        for number, state in enumerate(states):
            if state is not None and "buckets_coalesced" not in state and 0 not in state:
                raise ValueError("it has no grad buffers, so it is no optimizer's file")
            contents.add_buffers(state, name if len(states) == 1 else f"{name} {number}", name)
        model = (
            file.name.replace("distrib_optim", end) for end in ("model_optim_rng", "model_optim")
        )
        others = list(model)
    else:
        _add_model(contents, saved, name)
        if not any(RECORD in state for state in states_of(saved.get("optimizer"))):
            return  # Muon's DistributedOptimizer has no state here
        others = [re.sub("model_optim(_rng)?", "distrib_optim", file.name)]
    if not any(file.with_name(other).is_file() for other in others):
        contents.faults.append(f"{name} has no {' or '.join(others)} beside it, which is missing")


def _add_model(contents: Contents, saved: Any, file: str) -> None:
    chunks = {key: saved[key] for key in saved if _CHUNK.fullmatch(key)}
    if not chunks:
        raise ValueError("it has no model in it")
    if not contents.common:
        contents.common = {key: saved[key] for key in saved if not key.startswith("model")}
    contents.add_states(saved.get("optimizer"))
    for chunk, weights in chunks.items():
        for name, tensor in weights.items():
            if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
                part = f"{file} {chunk}"
                entry = contents.at("model", "weight", name, part, tensor.shape, tensor.dtype)
                entry.add(tensor.numel(), file)
