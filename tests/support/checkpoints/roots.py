"""Checkpoints as they lie below ``--save``, for tests that damage them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from megatron_muon.mcore.load_check import digest
from support.checkpoints.inspecting import DEFAULT, DP2, saved, seal
from support.models.gpt import Topology

TRACKER = "latest_checkpointed_iteration.txt"


def make_roots(where: Path) -> list[Path]:
    """What ``--save`` was given, in both formats, with a digest and without."""
    roots = []
    for format, topology in ((DEFAULT, DP2), ("torch", Topology(2, 1, 2))):
        root = where / format
        folder = root / "iter_0000003"
        folder.mkdir(parents=True)
        truth = saved(folder, format, topology)
        put_args(folder)
        (root / TRACKER).write_text("3")
        (folder / digest.FILE_NAME).unlink(missing_ok=True)
        sealed = Path(shutil.copytree(root, where / f"{format} sealed"))
        seal(sealed / folder.name, truth)
        roots += [root, sealed]
    return roots


def put_args(folder: Path) -> None:
    """Something of Megatron's arguments: enough that they are read, not enough for a model."""
    from argparse import Namespace

    args = Namespace(num_layers=2, world_size=2, hidden_size=96, lr=1e-3, dtype=torch.bfloat16)
    for file in [*folder.glob("common.pt"), *folder.glob("*model_optim.pt")]:
        held = torch.load(file, weights_only=False)
        torch.save({**held, "args": args, "iteration": 3}, file)
