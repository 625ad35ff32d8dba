"""Megatron-LM's tracker file names the checkpoint to load.

Megatron writes ``latest_checkpointed_iteration.txt`` after a save, in place. Nothing
here changes it or any other file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.files import open_regular
from megatron_muon.runtime.patches import replaced

NAME = "latest_checkpointed_iteration.txt"
# What earlier versions left where a save over the checkpoint that the tracker names was
# stopped: the folder that they had moved it to, and a mark.
_SET_ASIDE = re.compile(r"(iter_[0-9]{7,}|release)\.(?:before|anew)")
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


def named_by(save_dir: Path) -> str | None:
    """The name of the folder that the tracker names, if there is one; ValueError for a
    bad text.
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
        complete = digest.last_complete(save_dir)
        last = "" if complete is None else f" {complete}, the last complete one"
        raise ValueError(
            f"{path} has {text[:60]!r} in it, neither the number of an iteration nor "
            "release: write the number of the checkpoint to load into it, or give "
            f"--ckpt-step{last}"
        )
    return f"iter_{int(text):07d}"


def require_settled(load_dir: Path) -> None:
    """Refuse a folder in which a save by an earlier version was stopped, or still runs.

    Such a save moved the checkpoint that the tracker names to ``NAME.before`` and wrote
    anew.

    Raises:
        ValueError: has the commands that put it back, or aside where the new one is
            whole.
    """
    marks = (_SET_ASIDE.fullmatch(path.name) for path in load_dir.glob("*"))
    name = min((mark[1] for mark in marks if mark), default=None)
    if name is None:
        return
    here = shlex.quote(str(load_dir / name))
    tracker = shlex.quote(str(load_dir / NAME))
    moves = f"mv {here} {here}.stopped; mv {here}.before {here} && "
    if not (load_dir / f"{name}.before").is_dir():
        moves = ""
    elif digest.says_complete(load_dir / name):
        moves = f"mv {here}.before {here}.older && "
    number = digest.iteration_of(name)
    raise ValueError(
        f"a save into {load_dir / name} by an earlier megatron_muon was stopped, or "
        f"still runs. If it was stopped: {moves}rm -f {here}.anew && echo "
        f"{name if number is None else number} > {tracker}"
    )
