"""Megatron-LM's tracker file, which names the checkpoint to load: never one that is not complete.

Megatron writes ``latest_checkpointed_iteration.txt`` in place, after a save. Here it is written
beside and put in its place, and moved away before the checkpoint that it names is overwritten.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_muon import digest

NAME = "latest_checkpointed_iteration.txt"
# While the checkpoint that the tracker names is saved anew: where it is, and an empty file that is
# there from before it is moved until the tracker is written again, or names it as it was.
_ASIDE, _MARK = "{name}.before", "{name}.anew"

_first: Callable[[], None] | None = None  # called before the tracker is written


def put_into(checkpointing: Any) -> None:
    """Have ``megatron.training.checkpointing`` write its tracker through here. Idempotent.

    Args:
        checkpointing: the module, which opens files by its own name ``maybe_msc`` (since 0.18) or
            ``open_file`` (since 0.14), or by the built-in ``open``.
    """
    if hasattr(checkpointing, "maybe_msc"):
        if not isinstance(checkpointing.maybe_msc, _Storage):
            checkpointing.maybe_msc = _Storage(checkpointing.maybe_msc)
        return
    name = "open_file" if hasattr(checkpointing, "open_file") else "open"
    opened = getattr(checkpointing, name, builtins.open)
    if not isinstance(opened, _Open):
        setattr(checkpointing, name, _Open(opened))


class _Open:
    """An ``open`` that writes the tracker whole or not at all."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        local = "://" not in str(file)
        if mode == "w" and local and os.path.basename(str(file)) == NAME:
            return _written(Path(str(file)))
        return self._original(file, mode, *args, **kwargs)


class _Storage:
    """Megatron's ``maybe_msc`` with that ``open``."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.open = _Open(original.open)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextmanager
def _written(path: Path) -> Iterator[io.StringIO]:
    text = io.StringIO()
    yield text
    if _first is not None:
        _first()
    digest.write_text(path, text.getvalue())
    for name in _marked(path.parent):
        _clear(path.parent, name)


@contextmanager
def after(act: Callable[[], None]) -> Iterator[None]:
    """Within it ``act`` is done first wherever the tracker is written."""
    global _first
    before, _first = _first, act
    try:
        yield
    finally:
        _first = before


@contextmanager
def naming(checkpointing: Any, load_dir: str | None, step: int | None) -> Iterator[None]:
    """Within it Megatron takes the tracker in ``load_dir`` to name ``step``; None: what it names.

    With ``--ckpt-step`` and ``--ckpt-format torch`` Megatron reads the model and the groups of that
    step, but the rest of a distributed optimizer's state from the checkpoint that the tracker names
    (``load_checkpoint`` of core_v0.16.1: "NOTE: this is a manual read of the tracker file"). It
    does so with AdamW's, too.

    Args:
        checkpointing: the module ``megatron.training.checkpointing``.
    """
    original = checkpointing.read_metadata

    def read_metadata(tracker_filename: str, *args: Any, **kwargs: Any) -> Any:
        if Path(tracker_filename).parent == Path(str(load_dir)):
            return step, False
        return original(tracker_filename, *args, **kwargs)

    if load_dir is not None and step is not None:
        checkpointing.read_metadata = read_metadata
    try:
        yield
    finally:
        checkpointing.read_metadata = original


def named_by(save_dir: Path) -> str | None:
    """The name of the folder that the tracker names, None where there is no tracker.

    Raises:
        ValueError: it has neither a number nor ``release``.
    """
    try:
        text = (save_dir / NAME).read_text(errors="backslashreplace").strip()
    except FileNotFoundError:
        return None
    name = folder_of(text)
    if name is None:
        raise ValueError(
            f"{save_dir / NAME} has {text[:40]!r} in it, neither the number of an iteration nor "
            "release: write the number of the checkpoint to load into it, or give --ckpt-step"
        )
    return name


def folder_of(text: str) -> str | None:
    """The name of the folder that a tracker's text means; None where it means none."""
    text = text.strip()
    if text == "release":
        return text
    is_number = text.isascii() and text.isdigit() and len(text) < 20  # "²" is a digit, too
    return f"iter_{int(text):07d}" if is_number else None


def move_back(save_dir: Path, folder: str) -> str | None:
    """Before ``folder`` is written: set it aside, if the tracker names it, until the tracker is
    written again; ``recover`` brings it back where that never happens.

    Meanwhile the tracker names the last complete one before it, or else the last of all, and is
    removed where there is no other.

    Returns:
        What was done, in a sentence; None for nothing.

    Raises:
        OSError: the folder cannot be written.
    """
    if not (save_dir / folder).is_dir():
        return None
    with contextlib.suppress(ValueError):
        if named_by(save_dir) != folder:
            return None
    others = [n for n in digest.complete_iterations(save_dir) if f"iter_{n:07d}" != folder]
    earlier = [n for n in others if f"iter_{n:07d}" < folder]
    aside = save_dir / _ASIDE.format(name=folder)
    shutil.rmtree(aside, ignore_errors=True)
    digest.write_text(save_dir / _MARK.format(name=folder), "")
    said = f"{save_dir / folder} is saved anew: until then the checkpoint there is in {aside}"
    if others:
        number = (earlier or others)[-1]
        digest.write_text(save_dir / NAME, str(number))
        said = f"{said}, and {NAME} names iteration {number}"
    else:
        (save_dir / NAME).unlink(missing_ok=True)
    os.rename(save_dir / folder, aside)
    return said


def recover(save_dir: Path) -> str | None:
    """Bring back what ``move_back`` has set aside, where the save that was to replace it was ended.

    Only for a run that itself saves there: it would take away what another one is writing.

    Returns:
        What was done, in a sentence; None for nothing.

    Raises:
        OSError: the folder cannot be written.
        ValueError: see ``named_by``.
    """
    for name in _marked(save_dir):
        folder, aside = save_dir / name, save_dir / _ASIDE.format(name=name)
        if folder.is_dir() and named_by(save_dir) == name:  # that was written last
            _clear(save_dir, name)
            continue
        if aside.is_dir() and not digest.says_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(aside, folder)
        text = "release" if name == "release" else str(int(name.removeprefix("iter_")))
        digest.write_text(save_dir / NAME, text)
        _clear(save_dir, name)
        return f"the last save into {folder} was stopped: {NAME} names it as it was, complete"
    return None


def require_settled(load_dir: Path) -> None:
    """For a run that only loads from there.

    Raises:
        ValueError: the one checkpoint there is set aside, so that a load would find none.
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


def _marked(save_dir: Path) -> list[str]:
    """Names of what is saved anew."""
    suffix = _MARK.format(name="")
    return sorted(path.name.removesuffix(suffix) for path in save_dir.glob(f"*{suffix}"))


def _clear(save_dir: Path, name: str) -> None:
    """The mark first: what it stands for is put back, whatever is left of it."""
    (save_dir / _MARK.format(name=name)).unlink(missing_ok=True)
    shutil.rmtree(save_dir / _ASIDE.format(name=name), ignore_errors=True)
