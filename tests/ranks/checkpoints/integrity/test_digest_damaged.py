"""Digests that are damaged, or made to do harm: a DigestError each, whatever lies
beside them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.mcore.checkpoint.manifest import DigestError
from support.checkpoints.saving import formats
from support.checkpoints.sealing import errors_of_loads, saved
from support.models.gpt import Case, on_ranks
from support.ranks import run
from support.runs.topologies import DP2

CASE = Case(steps=1)
FORMAT = formats()[0]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    on_ranks(saved, CASE, DP2, FORMAT, folder)
    return folder


@pytest.fixture
def beside(real: Path, tmp_path: Path) -> Path:
    """The digest of iteration 7, beside a complete checkpoint and a damaged one."""
    for number in (4, 7):
        folder = tmp_path / f"iter_{number:07d}"
        folder.mkdir()
        for path in real.iterdir():
            os.link(path, folder / path.name)
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / manifest.FILE_NAME).write_text("{")
    file = tmp_path / "iter_0000007" / manifest.FILE_NAME
    text = file.read_bytes()
    file.unlink()  # a link no more
    file.write_bytes(text)
    return file


WAY_OUT = "The last complete one beside it is 4: --ckpt-step 4 loads it"


def refused(file: Path, message: str) -> None:
    with pytest.raises(DigestError, match=message) as caught:
        manifest.complete(file.parent)
    assert WAY_OUT in str(caught.value)
    assert not manifest.says_complete(file.parent)
    assert manifest.last_complete(file.parent.parent, 2) == 4


NESTED = (
    "[" * 200_000 + "]" * 200_000,
    '{"files": ' + "[" * 200_000 + "]" * 200_000 + "}",
)


def test_no_file(beside: Path) -> None:
    beside.unlink()
    beside.mkdir()
    refused(beside, "cannot be read")
    beside.rmdir()
    os.mkfifo(beside)  # whose reader would wait for ever
    refused(beside, "cannot be read")
    beside.unlink()
    beside.symlink_to(beside.name)
    refused(beside, "cannot be read")


def test_not_of_an_object(beside: Path) -> None:
    texts = ("3", "null", '"text"', "[]", "", "\x00" * 50, "{}", "1e999", "9" * 5000)
    for text in (*texts, *NESTED):
        beside.write_text(text)
        refused(beside, "is damaged")


def test_a_load_of_it_ends_on_all_ranks(real: Path, beside: Path) -> None:
    folder = beside.parent
    text = beside.read_text()
    messages = []
    for content in (text[:1000], NESTED[0]):
        beside.write_text(content)
        messages += on_ranks(errors_of_loads, CASE, DP2, FORMAT, [folder])
    for (error,) in messages:
        assert re.search(
            rf"megatron_muon.json is damaged: .*{re.escape(WAY_OUT)}", error or ""
        )


# --- another run has saved over it ----------------------------------------------------


def _overwritten_by_adamw(folder: Path) -> None:
    """Without the plugin's hooks, as a run without it."""
    from support.checkpoints.saving import save_new

    save_new(Case(steps=2, optimizer="adam"), DP2, FORMAT, folder)


def test_files_that_adamw_has_overwritten_are_named(
    beside: Path, tmp_path: Path
) -> None:
    folder = beside.parent
    for path in list(folder.iterdir()):  # no links
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert manifest.says_complete(folder)
    run(_overwritten_by_adamw, 2, folder)
    said = manifest.read(folder)
    assert said is not None and said["complete"]
    assert not manifest.says_complete(folder)  # as the sizes are others
    pattern = r"if a run without the plugin has saved over this folder, remove its megatron_muon"
    for (error,) in on_ranks(errors_of_loads, CASE, DP2, FORMAT, [folder]):
        assert re.search(pattern, error or ""), error
