"""What a run reads of a checkpoint before Megatron does: damage is an error that names the file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.mcore.checkpoint.interop.saved import Saved


@pytest.mark.parametrize("name", [".metadata", "common.pt", "model_optim_rng.pt"])
@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x80\x02K\x01."])
def test_a_damaged_file_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    if name == "common.pt":
        save({"weight": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path))
    folder = tmp_path / "mp_rank_00" if name.startswith("model") else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} cannot be read: "):
        Saved.of(tmp_path)


class _Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "model_optim_rng.pt"])
def test_no_name_in_a_file_chooses_code_that_runs(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    folder = tmp_path / "mp_rank_00" if name.startswith("model") else tmp_path
    folder.mkdir(exist_ok=True)
    groups = {"param_groups": [{"lr": 1.0, "odd": _Hostile(mark)}]}
    if name == ".metadata":
        (folder / name).write_bytes(pickle.dumps(_Hostile(mark)))
        with pytest.raises(ValueError, match="cannot be read"):
            Saved.of(tmp_path)
    else:
        if name == "common.pt":
            save({"weight": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path))
        torch.save({"optimizer": groups}, folder / name)
        (state,) = Saved.of(tmp_path).states
        assert state["param_groups"][0]["lr"] == 1.0
        with pytest.raises(ValueError, match="a group's odd is of a class, mkdir"):
            Saved.of(tmp_path).require_plain_groups()
    assert not mark.exists()


def test_no_checkpoint_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no checkpoint in it"):
        Saved.of(tmp_path)
