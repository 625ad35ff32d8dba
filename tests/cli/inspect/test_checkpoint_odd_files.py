"""Whatever a digest, a tracker or a folder has in it, ``inspect`` says so: no hang, no crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.mcore.load_check import digest
from support.checkpoints.inspecting import inspected, seal

TEXTS: dict[str, bytes] = {
    "deep lists": b"[" * 10**6 + b"]" * 10**6,
    "a long number": b"9" * 10**5,
    "not UTF-8": b"\xff\xfe\x00",
    "a way out": b"../../etc",
    "too long a name": b"1" * 300,
    "an escape": b"\x1b[2J",
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [digest.FILE_NAME, "latest_checkpointed_iteration.txt"])
def test_a_digest_and_a_tracker_may_have_anything_in_them(
    name: str, text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = folder if name == digest.FILE_NAME else folder.parent
    (where / name).write_bytes(TEXTS[text])
    status, said = inspected(where, capsys)
    assert status == 1 and name in said and "\x1b" not in said, said


def test_a_name_cannot_forge_lines_or_steer_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "x.weight\n\ncomplete\n\x1b[2J\ud800²"
    entry = {"shape": [3, 4], "optimizer": "muon"}
    seal(folder, parameters={evil: entry})
    status, said = inspected(folder, capsys)
    assert status == 0 and "\x1b" not in said and said.count("\ncomplete") == 1
    status, said = inspected(folder, capsys, "--json")
    assert status == 0 and evil in json.loads(said)["parameters"]
