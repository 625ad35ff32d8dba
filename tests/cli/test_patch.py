"""The patch goes in and comes out with the commands of patches/README.md."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron_muon.lab.doctor.rows import is_patched
from support import ROOT

PATCH = ROOT / "patches" / "megatron-training.patch"
FILE = "megatron/training/__init__.py"
# The end of the file in every release from core_v0.12.0 to main.
PLAIN = b"# Copyright\n\nimport torch\n\nfrom .utils import (print_rank_0,\n"
PLAIN += b"                    print_rank_last)\n"
GIT = ["git", "apply", "--ignore-whitespace"]
OWN = b"\nfrom .own import more\n"


@pytest.mark.parametrize(
    "plain, tool",
    [
        (PLAIN, GIT),
        (PLAIN.replace(b"\n", b"\r\n"), GIT),
        (PLAIN, ["patch", "-p1"]),
        (PLAIN + OWN, ["patch", "-p1"]),
    ],
    ids=["git", "git, CRLF", "patch", "patch, own lines"],
)
def test_the_patch_goes_in_and_comes_out_again(
    plain: bytes, tool: list[str], tmp_path: Path
) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(plain)
    assert not is_patched(tmp_path)
    for back in ([], ["-R"]):
        words = [*tool, *back, *(["-i"] if tool[0] == "patch" else []), str(PATCH)]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
        assert is_patched(tmp_path) == (not back)
        added = file.read_bytes().splitlines()
        assert b"import megatron_muon.autoload" in b" ".join(added) or back
    assert file.read_bytes() == plain
