"""Small files that would keep ``inspect`` busy, or fill a memory or a terminal: one clear line."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.lab.inspect import limited
from support.checkpoints.inspecting import inspected

TUPLES = b"".join(
    [b"\x80\x02})", *[b"q\x010" + b"(" + b"h\x01" * 250 + b"t"] * 6, b"Ns."]
)  # a tuple of 250 references to a tuple of 250 ..., as a key


def _texts(folder: Path) -> None:
    """10 MB of settings in a small file, by references."""
    settings = {"momentum": ["y" * 100_000] * 100}
    state = {"megatron_muon": {"settings": settings}, "optimizer": {"param_groups": []}}
    (folder / "mp_rank_00").mkdir()
    torch.save({"model": {}, "optimizer": state}, folder / "mp_rank_00" / "model_optim_rng.pt")


def _metadata(data: bytes) -> Any:
    return lambda folder: (folder / ".metadata").write_bytes(data)


SPOILT: dict[str, tuple[Any, int, str]] = {
    "shared tuples": (_metadata(TUPLES), 3, "took more than 1 s of processor time"),
    "deep tuples": (_metadata(b"\x80\x02})" + b"\x85" * 200_000 + b"Ns."), 3, "by signal 11"),
    "texts": (_texts, 3, "has more than 1 MiB"),
    "escapes": (_metadata(pickle.dumps("\x1b[2J")), 1, "not complete"),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SPOILT)
def test_a_small_file_ends_in_one_clear_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(limited, "SECONDS", 1)
    monkeypatch.setattr(limited, "_MOST_TEXT", 1 << 20)
    spoil, status, line = SPOILT[name]
    spoil(tmp_path)
    start = time.monotonic()
    actual, said = inspected(tmp_path, capsys)
    assert (actual, line in said) == (status, True), said[:2000]
    assert status != 3 or said.count("\n") == 1
    assert "\x1b" not in said and len(said) < 5000
    assert time.monotonic() - start < 60


def test_a_sparse_file_is_not_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its 3 GiB take nothing on disk, so they add nothing to the limits."""
    for name in (".metadata", "common.pt"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 3 << 30)
    status, said = inspected(tmp_path, capsys)
    assert status == 1 and ".metadata cannot be read" in said and len(said) < 5000
