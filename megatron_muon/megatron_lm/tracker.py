"""Megatron-LM's tracker file names the checkpoint to load; here it never names an incomplete one.

Megatron writes ``latest_checkpointed_iteration.txt`` in place, after a save. Here it is replaced
atomically. Before its checkpoint is overwritten, it is changed to name another one, or removed.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_muon.files import claim, digest
from megatron_muon.files.durable import write_text
from megatron_muon.files.regular import read_regular
from megatron_muon.runtime.patches import Patches, replaced

NAME = "latest_checkpointed_iteration.txt"
# While the checkpoint that the tracker names is saved anew: the folder that it is moved to, and an
# empty mark. The mark exists from before the move until the tracker is written again.
_ASIDE, _MARK = "{name}.before", "{name}.anew"
_MARKED = re.compile(r"(iter_[0-9]{7,}|release)\.anew")
_MOST = 4096  # cap on a tracker's bytes; a number has few

_patches = Patches()  # replacements in megatron.training.checkpointing
_first: Callable[[], None] | None = None  # called before the tracker is written
_failed: Callable[[BaseException], None] | None = None  # called where it cannot be written


def put_into(checkpointing: Any) -> None:
    """Have ``megatron.training.checkpointing`` write its tracker through this module. Idempotent.

    Args:
        checkpointing: that module. It opens files by its own ``maybe_msc`` (since 0.18) or
            ``open_file`` (since 0.14), or by the built-in ``open``.
    """
    if hasattr(checkpointing, "maybe_msc"):
        if not isinstance(checkpointing.maybe_msc, _StorageClient):
            _patches.set(checkpointing, "maybe_msc", _StorageClient(checkpointing.maybe_msc))
        return
    name = "open_file" if hasattr(checkpointing, "open_file") else "open"
    opened = getattr(checkpointing, name, builtins.open)
    if not isinstance(opened, _Open):
        _patches.add(checkpointing, name, _Open(opened))


def take_out() -> None:
    """Undo ``put_into``."""
    _patches.undo()


class _Open:
    """An ``open`` that writes the tracker whole or not at all."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        local = "://" not in str(file)
        if mode == "w" and local and os.path.basename(str(file)) == NAME:
            return _written(Path(str(file)))
        return self._original(file, mode, *args, **kwargs)


class _StorageClient:
    """Megatron's ``maybe_msc`` with an ``_Open``."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.open = _Open(original.open)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def _written(path: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    try:
        if _first is not None:
            _first()
        write_text(path, text.getvalue())
        for name in _marked(path.parent):
            _clear(path.parent, name)
    except BaseException as error:
        if _failed is not None:
            _failed(error)
        raise


@contextmanager
def after(act: Callable[[], None]) -> Iterator[None]:
    """Within it ``act`` is called each time before the tracker is written."""
    global _first
    before, _first = _first, act
    try:
        yield
    finally:
        _first = before


@contextmanager
def failing(told: Callable[[BaseException], None]) -> Iterator[None]:
    """Within it ``told`` gets the error where the tracker cannot be written.

    Only the rank that writes the tracker has the error.
    """
    global _failed
    before, _failed = _failed, told
    try:
        yield
    finally:
        _failed = before


@contextmanager
def naming(checkpointing: Any, load_dir: str | None, step: int | None) -> Iterator[None]:
    """Within it Megatron reads ``step`` from the tracker in ``load_dir``.

    With ``--ckpt-step`` and ``--ckpt-format torch`` Megatron loads the model and the parameter
    groups of that step. It loads the rest of a distributed optimizer's state, also AdamW's, from
    the checkpoint that the tracker names. Source: ``load_checkpoint`` of core_v0.16.1 ("NOTE: this
    is a manual read of the tracker file").

    Args:
        checkpointing: the module ``megatron.training.checkpointing``.
        load_dir: the folder that is loaded from; None changes nothing.
        step: ``--ckpt-step``; None changes nothing.
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
    """The name of the folder that the tracker names; None where there is no tracker.

    Raises:
        ValueError: the tracker holds neither a number nor ``release``.
        OSError: the tracker cannot be read, or is no regular file.
    """
    path = save_dir / NAME
    try:
        text = read_regular(path, _MOST).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None
    if text == "release":
        return text
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(
            f"{path} has {text[:60]!r} in it, neither the number of an iteration nor release: "
            "write the number of the checkpoint to load into it, or give --ckpt-step"
        )
    return f"iter_{int(text):07d}"


def move_back(save_dir: Path, folder: str) -> str | None:
    """Before a save overwrites ``folder``: move it aside if the tracker names it.

    The tracker then names the last complete checkpoint before it, else the last complete one of
    all; without one it is removed. Once the save writes the tracker, the old checkpoint is deleted;
    ``recover`` brings it back if that never happens.

    Returns:
        A sentence that says what was done; None if nothing was.

    Raises:
        OSError: ``save_dir`` cannot be written.
    """
    if not (save_dir / folder).is_dir():
        return None
    with contextlib.suppress(ValueError):
        if named_by(save_dir) != folder:
            return None
    number = digest.iteration_of(folder)
    others = [other for other in digest.complete_iterations(save_dir) if other != number]
    earlier = [other for other in others if number is None or other < number]
    aside = save_dir / _ASIDE.format(name=folder)
    shutil.rmtree(aside, ignore_errors=True)
    write_text(save_dir / _MARK.format(name=folder), "")
    said = f"{save_dir / folder} is saved anew: until then the checkpoint there is in {aside}"
    if others:
        named = (earlier or others)[-1]
        write_text(save_dir / NAME, str(named))
        said = f"{said}, and {NAME} names iteration {named}"
    else:
        (save_dir / NAME).unlink(missing_ok=True)
    os.rename(save_dir / folder, aside)
    return said + _passed_over(save_dir, number)


def _passed_over(save_dir: Path, number: int | None) -> str:
    damaged = [str(other) for other in digest.damaged_iterations(save_dir) if other != number]
    if not damaged:
        return ""
    return (
        f". WARNING: the digest of iteration {digest.first_names(damaged)} is damaged, so that "
        "checkpoint cannot be loaded"
    )


def recover(save_dir: Path) -> str | None:
    """Bring back the checkpoint that ``move_back`` set aside, where the save after it was stopped.

    Only for a run that itself saves into ``save_dir``: it would delete what another run is writing.

    Returns:
        A sentence that says what was done; None if nothing was.

    Raises:
        OSError: ``save_dir`` cannot be written.
        ValueError: see ``named_by``.
        TwoSavesError: another job still runs the save.
    """
    for name in _marked(save_dir):
        folder, aside = save_dir / name, save_dir / _ASIDE.format(name=name)
        _require_stopped(folder)
        if folder.is_dir() and named_by(save_dir) == name:  # the tracker was written last
            _clear(save_dir, name)
            continue
        if aside.is_dir() and not digest.says_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(aside, folder)
        number = digest.iteration_of(name)
        write_text(save_dir / NAME, "release" if number is None else str(number))
        _clear(save_dir, name)
        return f"the last save into {folder} was stopped: {NAME} names it as it was, complete"
    return None


def require_settled(load_dir: Path) -> None:
    """Check a folder that this run loads from and does not save into.

    Raises:
        ValueError: its only checkpoint is set aside, so a load would find none.
    """
    if (load_dir / NAME).exists():
        return
    for name in _marked(load_dir):
        aside = load_dir / _ASIDE.format(name=name)
        raise ValueError(
            f"{load_dir / name} is being saved anew, or that was stopped; the checkpoint from "
            f"before is in {aside}: wait for the run that saves there or start it again, which "
            f"puts it back, or load a copy of {aside} named {name} with --ckpt-step"
        )


def _require_stopped(folder: Path) -> None:
    if claim.is_held(folder):
        raise digest.TwoSavesError(
            f"{folder} is being saved anew by {claim.described(claim.holder(folder))}: wait for "
            "that job or end it, and start this one again"
        )


def _marked(save_dir: Path) -> list[str]:
    """Names of the folders with a mark: a save overwrites them, or was stopped."""
    names = (path.name for path in save_dir.glob(_MARK.format(name="*")))
    return sorted(match[1] for name in names if (match := _MARKED.fullmatch(name)))


def _clear(save_dir: Path, name: str) -> None:
    """Delete the mark, then the old checkpoint: ``recover`` may restore it while it is marked."""
    (save_dir / _MARK.format(name=name)).unlink(missing_ok=True)
    shutil.rmtree(save_dir / _ASIDE.format(name=name), ignore_errors=True)
