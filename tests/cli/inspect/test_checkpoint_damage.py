"""Damage that is read without a digest: an error names the file, in training and ``inspect``."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.lab.commands import main
from support.checkpoints.inspecting import DEFAULT, faults

METADATA: dict[str, Callable[[Any], Any]] = {
    "a number": lambda metadata: 3,
    "a dict": lambda metadata: {"state_dict_metadata": {}, "storage_data": {}},
    "state_dict_metadata": lambda metadata: setattr(metadata, "state_dict_metadata", 3),
    "storage_data": lambda metadata: setattr(metadata, "storage_data", [1]),
    "a key": lambda metadata: metadata.state_dict_metadata.update({3: None}),
    "a place": lambda metadata: metadata.storage_data.update({"x": 3}),
}


@pytest.mark.parametrize("whole_one", [DEFAULT], indirect=True)
@pytest.mark.parametrize("what", METADATA)
def test_metadata_with_other_things_in_them(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    instead = METADATA[what](metadata)
    whole = instead if isinstance(instead, (int, dict)) else metadata
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    assert ".metadata cannot be read: " in faults(folder, capsys)


@pytest.mark.parametrize(
    "saved_object",
    [3, [1], {}, {"model": 3}, {"model": {}, "optimizer": 3}, {0: {}}, {0: {("a",): 3}},
     {"model": {}, "optimizer": {"optimizer": {"param_groups": 3}}},
     {"model": {}, "optimizer": {"megatron_muon": 3}},
     {"model": {}, "optimizer": {"megatron_muon": {"settings": 3}}}],
    ids=str,
)  # fmt: skip
def test_files_that_hold_something_else(
    saved_object: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (folder / "common.pt", folder / "mp_rank_00" / "model_optim_rng.pt"):
        if file.exists():
            torch.save(saved_object, file)
    status = main(["checkpoint", "inspect", str(folder)])
    out, err = capsys.readouterr()
    assert status == 1 and not err and "not complete: " in out, err


def test_chains_without_end() -> None:
    from megatron_muon.mcore.checkpoint.interop.foreign import states_of

    endless: list[Any] = []
    endless.append(endless)
    wide: Any = [{"optimizer": {}}]
    for _ in range(30):
        wide = [wide, wide]
    for saved_chain in (endless, wide, [[[[[{}]]]]]):
        with pytest.raises(ValueError, match="no chain"):
            states_of(saved_chain)
    assert states_of([[{"a": 1}], {0: {"b": 2}}, None]) == [{"a": 1}, {"b": 2}]
