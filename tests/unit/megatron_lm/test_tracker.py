"""The tracker file: a plain file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.megatron_lm import tracker

FOUR, SIX = "iter_0000004", "iter_0000006"


def _checkpoint(folder: Path) -> None:
    mark = manifest.begin(folder)
    manifest.finish(folder, mark, {"wrote": {}, "record": None, "files": {}})


def test_a_tracker_that_was_cut_off_is_refused_with_the_last_complete_one(
    tmp_path: Path,
) -> None:
    for name in (FOUR, SIX):
        _checkpoint(tmp_path / name)
    manifest.begin(tmp_path / SIX)
    (tmp_path / tracker.NAME).write_text("")
    with pytest.raises(
        ValueError, match=r"or give --ckpt-step 4, the last complete one"
    ):
        tracker.named_by(tmp_path, manifest.last_complete)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", "pipe folder device loop".split())
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
        tracker.named_by(tmp_path, manifest.last_complete)
    assert str(path) in str(caught.value)
