"""The tracker file and the checkpoint that is set aside while it is saved anew: plain files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_muon.files import digest
from megatron_muon.megatron_lm import tracker

FOUR, SIX = "iter_0000004", "iter_0000006"


def _checkpoint(folder: Path, content: str, digested: bool = True) -> None:
    folder.mkdir()
    (folder / "weights").write_text(content)
    if digested:
        digest.finish(folder, {})


def _named(folder: Path) -> str | None:
    return (folder / tracker.NAME).read_text() if (folder / tracker.NAME).exists() else None


def _is_whole(folder: Path, name: str, content: str) -> bool:
    """It is there, the tracker names it and nothing is set aside."""
    there = (folder / name / "weights").read_text() == content
    left = [*folder.glob("*.before"), *folder.glob("*.anew")]
    return there and tracker.named_by(folder) == name and not left


@pytest.fixture(params=[True, False], ids=["digest", "no-digest"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """One checkpoint, named by the tracker."""
    _checkpoint(tmp_path / FOUR, "first", request.param)
    (tmp_path / tracker.NAME).write_text("4")
    return tmp_path


def test_the_only_one_is_set_aside_and_put_back(saved: Path) -> None:
    assert "is saved anew" in (tracker.move_back(saved, FOUR) or "")
    assert _named(saved) is None and not (saved / FOUR).exists()
    _checkpoint(saved / FOUR, "second, in part", digested=False)
    assert "was stopped" in (tracker.recover(saved) or "")
    assert _is_whole(saved, FOUR, "first")
    assert tracker.recover(saved) is None


def test_with_others_the_tracker_names_the_one_before_until_it_is_put_back(tmp_path: Path) -> None:
    _checkpoint(tmp_path / FOUR, "four")
    _checkpoint(tmp_path / SIX, "six")
    (tmp_path / tracker.NAME).write_text("6")
    assert "names iteration 4" in (tracker.move_back(tmp_path, SIX) or "")
    assert _named(tmp_path) == "4"
    tracker.recover(tmp_path)
    assert _is_whole(tmp_path, SIX, "six")


def test_one_that_the_tracker_does_not_name_is_overwritten_in_place(saved: Path) -> None:
    _checkpoint(saved / SIX, "of a branch that was left")
    assert tracker.move_back(saved, SIX) is None
    assert _is_whole(saved, FOUR, "first")


def test_what_was_saved_anew_stays_however_far_the_old_one_was_cleared_away(saved: Path) -> None:
    """Killed right after the tracker was written; without a digest nothing else tells."""
    tracker.move_back(saved, FOUR)
    _checkpoint(saved / FOUR, "second", digested=False)
    (saved / tracker.NAME).write_text("4")
    (saved / f"{FOUR}.before" / "weights").unlink()
    assert tracker.recover(saved) is None
    assert _is_whole(saved, FOUR, "second")


def test_one_that_was_complete_before_the_tracker_was_written_stays(tmp_path: Path) -> None:
    _checkpoint(tmp_path / FOUR, "first")
    (tmp_path / tracker.NAME).write_text("4")
    tracker.move_back(tmp_path, FOUR)
    _checkpoint(tmp_path / FOUR, "second")
    tracker.recover(tmp_path)
    assert _is_whole(tmp_path, FOUR, "second")


def test_killed_before_it_is_set_aside(tmp_path: Path) -> None:
    """The tracker names another already, and nothing is moved yet."""
    _checkpoint(tmp_path / FOUR, "four")
    _checkpoint(tmp_path / SIX, "six", digested=False)
    (tmp_path / f"{SIX}.anew").touch()
    (tmp_path / tracker.NAME).write_text("4")
    tracker.recover(tmp_path)
    assert _is_whole(tmp_path, SIX, "six")


def test_killed_while_an_old_one_is_cleared_away_after_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-save of 4 was stopped; another run wrote 6 without loading, and was killed in turn."""
    _checkpoint(tmp_path / FOUR, "four")
    (tmp_path / tracker.NAME).write_text("4")
    tracker.move_back(tmp_path, FOUR)
    _checkpoint(tmp_path / FOUR, "four, in part", digested=False)
    _checkpoint(tmp_path / SIX, "six")

    def killed(folder: Path, **options: bool) -> None:
        (folder / "weights").unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(tracker.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt), tracker._written(tmp_path / tracker.NAME) as text:
        text.write("6")
    monkeypatch.undo()
    tracker.recover(tmp_path)
    assert tracker.named_by(tmp_path) == SIX


def test_killed_while_it_is_put_back(tmp_path: Path) -> None:
    _checkpoint(tmp_path / FOUR, "four")
    _checkpoint(tmp_path / SIX, "six")
    (tmp_path / tracker.NAME).write_text("6")
    tracker.move_back(tmp_path, SIX)
    (tmp_path / f"{SIX}.before").rename(tmp_path / SIX)
    tracker.recover(tmp_path)
    assert _is_whole(tmp_path, SIX, "six")


def test_the_tracker_never_names_what_is_not_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(one: Path, two: Path) -> None:
        assert tracker.named_by(saved) != one.name
        original(one, two)

    original = os.rename
    monkeypatch.setattr(tracker.os, "rename", rename)
    tracker.move_back(saved, FOUR)
    assert (saved / f"{FOUR}.before").is_dir()


def test_a_run_that_only_loads_is_told_and_changes_nothing(saved: Path) -> None:
    tracker.require_settled(saved)
    tracker.move_back(saved, FOUR)
    _checkpoint(saved / FOUR, "second, in part", digested=False)
    with pytest.raises(ValueError, match=r"is being saved anew, or that was stopped; .* wait for"):
        tracker.require_settled(saved)
    assert (saved / FOUR / "weights").read_text() == "second, in part"
    shutil.rmtree(saved / FOUR)
    tracker.recover(saved)
    tracker.require_settled(saved)


class _Megatrons:
    """What of megatron.training.checkpointing the tracker is about."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def read_metadata(self, tracker_filename: str) -> tuple[int, bool]:
        self.read.append(tracker_filename)
        return 9, True


@pytest.mark.parametrize(
    "spelled", [str, lambda folder: f"{folder}/", lambda folder: f"{folder}/."]
)
def test_with_a_step_given_the_tracker_names_that_one(
    spelled: Callable[[Path], str], tmp_path: Path
) -> None:
    module = _Megatrons()
    load_dir = spelled(tmp_path)
    with tracker.naming(module, load_dir, 4):
        assert module.read_metadata(f"{load_dir}/{tracker.NAME}") == (4, False)
        assert module.read_metadata(f"{tmp_path}/other/{tracker.NAME}") == (9, True)
    assert module.read_metadata(f"{load_dir}/{tracker.NAME}") == (9, True)
    with tracker.naming(module, load_dir, None):
        assert module.read_metadata(f"{load_dir}/{tracker.NAME}") == (9, True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_what_is_no_regular_file_is_an_error_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / tracker.NAME
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    with pytest.raises(OSError, match=r"no regular file|symbolic links") as caught:
        tracker.named_by(tmp_path)
    assert str(path) in str(caught.value)
