"""Megatron-LM's tracker file names the checkpoint to load.

Megatron writes ``latest_checkpointed_iteration.txt`` after a save, in place. Nothing
here changes it or any other file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_muon.mcore.checkpoint.files import open_regular
from megatron_muon.runtime.patches import replaced

NAME = "latest_checkpointed_iteration.txt"
_MOST = 4096  # cap on a tracker's bytes; a number has few


@contextmanager
def naming(
    checkpointing: Any, load_dir: str | None, step: int | None
) -> Iterator[None]:
    """A context in which Megatron reads ``step``, of ``--ckpt-step``, from the tracker
    in ``load_dir``.

    With ``--ckpt-format torch`` Megatron loads the model and the parameter groups of
    that step. It loads the rest of a distributed optimizer's state, also AdamW's, from
    the checkpoint that the tracker names. Source: ``load_checkpoint`` of core_v0.16.1
    ("NOTE: this is a manual read of the tracker file").
    """
    if load_dir is None or step is None:
        yield
        return
    original = checkpointing.read_metadata

    def read_metadata(tracker_filename: str, *args: Any, **kwargs: Any) -> Any:
        if Path(tracker_filename).parent == Path(str(load_dir)):
            return step, False
        return original(tracker_filename, *args, **kwargs)

    with replaced(checkpointing, read_metadata=read_metadata):
        yield


def named_by(save_dir: Path, last_whole: Callable[[Path], int | None]) -> str | None:
    """The name of the folder that the tracker names, if there is one; ValueError for a
    bad text, with the iteration to load in its place: ``last_whole(save_dir)``.
    """
    path = save_dir / NAME
    try:
        with open_regular(path) as file:
            text = file.read(_MOST).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    if text == "release":
        return text
    if not re.fullmatch("[0-9]{1,18}", text):
        whole = last_whole(save_dir)
        last = "" if whole is None else f" {whole}, the last complete one"
        raise ValueError(
            f"{path} has {text[:60]!r} in it, neither the number of an iteration nor "
            "release: write the number of the checkpoint to load into it, or give "
            f"--ckpt-step{last}"
        )
    return f"iter_{int(text):07d}"
