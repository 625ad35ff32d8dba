"""The tracker file, and what saves of earlier versions had set aside: plain files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_muon.mcore.load_check import digest
from megatron_muon.megatron_lm import tracker

FOUR, SIX = "iter_0000004", "iter_0000006"


def _checkpoint(folder: Path, content: str, digested: bool = True) -> None:
    folder.mkdir()
    (folder / "weights").write_text(content)
    if digested:
        digest.finish(folder, {})


# What a save over iteration 6 by an earlier version left, wherever it was killed: by
# name, what is in iter_0000006 and iter_0000006.before (None: there is none), whether
# there is a mark, what the tracker names, and the content that is to be loaded.
LEFT = {
    "before it is moved": ("six", None, True, 4, "six"),
    "after it is moved": (None, "six", True, 4, "six"),
    "in the new save": ("partial", "six", True, 4, "six"),
    "before the tracker": ("new", "six", True, 4, "new"),
    "after the tracker": ("new", "six", True, 6, "new"),
    "while it is removed": ("new", "", False, 6, "new"),
}


@pytest.mark.parametrize("when", LEFT)
def test_files_of_an_earlier_versions_stopped_save_are_refused_with_the_repair(
    when: str, tmp_path: Path
) -> None:
    there, aside, mark, named, right = LEFT[when]
    _checkpoint(tmp_path / FOUR, "four")
    if there is not None:
        _checkpoint(tmp_path / SIX, there, digested=there != "partial")
    if aside is not None:
        _checkpoint(tmp_path / f"{SIX}.before", aside)
    if mark:
        (tmp_path / f"{SIX}.anew").touch()
    (tmp_path / tracker.NAME).write_text(str(named))
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(
        ValueError, match="by an earlier megatron_muon was stopped"
    ) as caught:
        tracker.require_settled(tmp_path)
    assert before == sorted(path for path in tmp_path.rglob("*"))  # nothing was changed
    subprocess.run(
        str(caught.value).split("If it was stopped: ")[1], shell=True, check=True
    )
    tracker.require_settled(tmp_path)
    assert tracker.named_by(tmp_path) == SIX
    assert (tmp_path / SIX / "weights").read_text() == right
    assert (tmp_path / FOUR / "weights").read_text() == "four"


def test_a_tracker_that_was_cut_off_is_refused_with_the_last_complete_one(
    tmp_path: Path,
) -> None:
    for name in (FOUR, SIX):
        _checkpoint(tmp_path / name, name)
    digest.begin(tmp_path / SIX, {})
    (tmp_path / tracker.NAME).write_text("")
    with pytest.raises(
        ValueError, match=r"or give --ckpt-step 4, the last complete one"
    ):
        tracker.named_by(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_what_is_no_regular_file_is_an_error_and_not_waited_for(
    kind: str, tmp_path: Path
) -> None:
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
