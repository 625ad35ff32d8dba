"""Digests that are damaged, or made to do harm: a DigestError each, whatever lies beside them."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.digest import DigestError
from megatron_muon.mcore.load_check.digest_text import MOST, sealed
from support.checkpoints.saving import formats
from support.checkpoints.sealing import errors_of_loads, saved
from support.models.gpt import Case, Topology
from support.ranks import run

CASE, DP, FORMAT = Case(steps=1), Topology(dp=2), formats()[0]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    run(saved, 2, CASE, DP, FORMAT, str(folder))
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
    (tmp_path / "iter_0000005" / digest.FILE_NAME).write_text("{")
    file = tmp_path / "iter_0000007" / digest.FILE_NAME
    text = file.read_bytes()
    file.unlink()  # a link no more
    file.write_bytes(text)
    return file


WAY_OUT = "The last complete one beside it is 4: --ckpt-step 4 loads it"


def refused(file: Path, message: str) -> None:
    with pytest.raises(DigestError, match=message) as caught:
        digest.read(file.parent)
    assert WAY_OUT in str(caught.value)
    assert not digest.says_complete(file.parent)
    assert digest.complete_iterations(file.parent.parent) == [4]


def test_every_cut_and_many_flips_of_a_real_one(beside: Path, monkeypatch: Any) -> None:
    """The others beside it are read once: 10,000 digests take a while."""
    complete = digest.complete_iterations(beside.parent.parent)
    text = beside.read_bytes()
    assert complete == [4, 7] and len(text) > 2000
    refused_ones = 0
    monkeypatch.setattr(digest, "complete_iterations", lambda folder: [4])
    changed = [text[:stop] for stop in range(len(text) - 1)]
    changed += [
        text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :]
        for at in range(0, len(text), 7)
        for bit in (0, 3, 7)
    ]
    for content in changed:
        beside.write_bytes(content)
        with pytest.raises(DigestError, match=r"is damaged|is of format") as caught:
            digest.read(beside.parent)
        assert WAY_OUT in str(caught.value)
        refused_ones += 1
    assert refused_ones == len(changed)
    monkeypatch.undo()
    for stop in (0, 1, len(text) // 2, len(text) - 2):
        beside.write_bytes(text[:stop])
        refused(beside, "is damaged: it is not what was written")


NESTED = {
    "lists": "[" * 200_000 + "]" * 200_000,
    "objects": '{"a":' * 200_000 + "1" + "}" * 200_000,
    "in a key": '{"complete": true, "files": ' + "[" * 200_000 + "]" * 200_000 + "}",
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_deeply(name: str, beside: Path) -> None:
    beside.write_text(NESTED[name])
    refused(beside, "is damaged: it is not what was written")


def test_no_file(beside: Path) -> None:
    beside.unlink()
    beside.mkdir()
    refused(beside, "is damaged: it is no file")
    beside.rmdir()
    os.mkfifo(beside)  # whose reader would wait for ever
    refused(beside, "is damaged: it is no file")
    beside.unlink()
    beside.symlink_to("nothing")
    refused(beside, "is damaged: it is a link to nothing")
    beside.unlink()
    beside.symlink_to(beside.name)
    refused(beside, "cannot be read")


def test_too_large(beside: Path) -> None:
    os.truncate(beside, MOST + 1)
    start = time.monotonic()
    refused(beside, f"is damaged: it has {MOST + 1} bytes")
    assert time.monotonic() - start < 1.0


HOSTILE: dict[str, dict[str, Any]] = {
    "complete": {"complete": "yes"},
    "files": {"files": [1, 2]},
    "an entry": {"files": {"a": None}},
    "a size": {"files": {"a": {"size": "9", "hash": ""}}},
    "a place": {"files": {"../a": {"size": 9, "hash": ""}}},
    "the root": {"files": {"/etc/passwd": {"size": 9, "hash": ""}}},
    "names": {"files": {"a": {"size": 9, "hash": "", "holds": [1]}}},
    "parameters": {"parameters": {"a": {"shape": "9", "optimizer": "muon"}}},
    "a shape": {"parameters": {"a": {"shape": [9, -1], "optimizer": "muon"}}},
    "vocabulary": {"vocabulary": "many"},
    "settings": {"settings": 3},
    "model": {"model": []},
    "save": {"save": {"id": 7}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_right_hash_over_wrong_types(name: str, beside: Path) -> None:
    said = json.loads(beside.read_text())
    del said["hash"]
    beside.write_text(sealed({**said, **HOSTILE[name]}))
    (key,) = HOSTILE[name]
    refused(beside, f"is damaged: its {key} is not what a digest has there")


@pytest.mark.parametrize("name", ["\0", "\ud800", "a" * 5000])
def test_names_that_no_file_can_have(name: str, beside: Path) -> None:
    entry = {"size": 9, "hash": "crc32+blake2b:0"}
    said = {**json.loads(beside.read_text()), "files": {name: entry}}
    del said["hash"]
    beside.write_text(sealed(said))
    assert digest.read(beside.parent)
    assert not digest.says_complete(beside.parent)
    fault = digest.fault(beside.parent, name, entry, lambda path: "")
    assert fault is not None and "cannot be read" in fault


def test_not_of_an_object(beside: Path) -> None:
    for text in ("3", "null", '"text"', "[]", "", "\x00" * 50, "{}", "1e999", "9" * 5000):
        beside.write_text(text)
        refused(beside, "is damaged")


def test_a_load_of_it_ends_on_all_ranks(real: Path, beside: Path) -> None:
    folder = beside.parent
    text = beside.read_text()
    messages = []
    for content in (text[:1000], NESTED["lists"]):
        beside.write_text(content)
        messages += run(errors_of_loads, 2, CASE, DP, FORMAT, [str(folder)])
    for (error,) in messages:
        assert re.search(rf"megatron_muon.json is damaged: .*{re.escape(WAY_OUT)}", error or "")


@pytest.mark.timeout(120)
def test_a_load_waits_at_no_pipe(real: Path, beside: Path) -> None:
    """Megatron and torch open files by their names, whether a digest lists them or not."""
    folder = beside.parent
    (folder / "extra").mkdir()
    os.mkfifo(folder / "extra" / "common.pt")
    (with_digest,), (other,) = run(errors_of_loads, 2, CASE, DP, FORMAT, [str(folder)])
    beside.unlink()
    (without,), _ = run(errors_of_loads, 2, CASE, DP, FORMAT, [str(folder)])
    for error in (with_digest, without):
        assert re.search(r"extra/common\.pt is no regular file, but a pipe", error or "")
    assert "rank 0 stopped this run" in (other or "")


# --- another run has saved over it --------------------------------------------------------------


def _overwritten_by_adamw(folder: str) -> None:
    """Without the plugin's hooks, as a run without it."""
    from support.checkpoints.saving import save_new

    shutil.rmtree(Path(folder, "nothing"), ignore_errors=True)
    save_new(Case(steps=2, optimizer="adam"), DP, FORMAT, folder)


def test_what_adamw_has_saved_over_it_is_said(beside: Path, tmp_path: Path) -> None:
    folder = beside.parent
    for path in list(folder.iterdir()):  # no links
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    beside.write_bytes(beside.read_bytes())
    assert digest.says_complete(folder)
    time.sleep(0.05)
    run(_overwritten_by_adamw, 2, str(folder))
    said = digest.read(folder)
    assert said is not None and said["complete"]
    assert not digest.says_complete(folder)  # as the sizes are others
    pattern = r"it is newer than megatron_muon.json: a run that makes no digest, such as AdamW's"
    for (error,) in run(errors_of_loads, 2, CASE, DP, FORMAT, [str(folder)]):
        assert re.search(pattern, error or ""), error
        assert f"remove {beside}, and what is there now loads unchecked" in (error or "")


def test_of_a_file_that_decayed_nothing_of_that_is_said(beside: Path) -> None:
    name = next(iter(json.loads(beside.read_text())["files"]))
    path = beside.parent / name
    entry = {**digest.describe(path, lambda path: ""), "hash": "of other bytes"}
    os.utime(path, (1, 1))
    fault = digest.fault(beside.parent, name, entry, lambda path: "")
    assert fault is not None and fault.endswith("are not those that were written")


def without_psutil(case: Case, topology: Topology, format: str, folder: str) -> str:
    """What a save raises where Megatron's writers lack it; they would end, and their rank wait."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    has, filesystem_async.HAVE_PSUTIL = getattr(filesystem_async, "HAVE_PSUTIL", True), False
    try:
        saved(case, topology, format, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        filesystem_async.HAVE_PSUTIL = has
    return ""


@pytest.mark.timeout(120)
def test_a_save_without_psutil_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for error in run(without_psutil, 2, CASE, DP, FORMAT, str(tmp_path / "iter_0000001")):
        assert "pip install psutil" in error
