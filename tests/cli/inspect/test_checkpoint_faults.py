"""What ``megatron-muon checkpoint inspect`` finds not complete, without a digest and with one."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.mcore.load_check import digest
from support.checkpoints.inspecting import CASE, DEFAULT, EVERY, NAME, faults, saved, seal
from support.models.gpt import muon_weights

SHARDED = [format for format in EVERY if format != "torch"]


@pytest.mark.parametrize("how", ["gone", "cut off"])
@pytest.mark.parametrize("format", EVERY)
def test_every_file_is_needed(
    how: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a digest, so from the files alone."""
    whole_one = tmp_path / "whole"
    whole_one.mkdir()
    saved(whole_one, format)
    for file in sorted(whole_one.iterdir()):
        if file.name == "metadata.json" and how == "cut off":
            continue  # nothing but a name is read of it
        copy = tmp_path / f"without{file.name}"
        shutil.copytree(whole_one, copy)
        if how == "gone":
            (copy / file.name).unlink()
        else:
            os.truncate(copy / file.name, file.stat().st_size // 2)
        assert file.name in faults(copy, capsys), file.name


@pytest.mark.parametrize("format", SHARDED)
def test_a_key_that_is_gone(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metadata knows nothing of one momentum, or of one second moment."""
    if format == "dp_zero_gather_scatter":
        pytest.skip("its state is one object")
    saved(tmp_path, format)
    original = (tmp_path / ".metadata").read_bytes()
    for part, weight in ((".muon_momentum.", "linear_fc1.weight"), (".exp_avg_sq.", "embedding")):
        metadata = pickle.loads(original)
        keys = [key for key in metadata.state_dict_metadata if part in key and weight in key]
        assert keys
        for key in keys:
            del metadata.state_dict_metadata[key]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        text = faults(tmp_path, capsys)
        if weight == "embedding":
            assert "word_embeddings.weight is AdamW's and has no exp_avg_sq" in text
        else:
            assert f"{NAME} has a main parameter, but neither momentum" in text


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "0_0_0_distrib_optim.pt"
    saved = torch.load(file)
    (buffer,) = saved[0].values()
    change(buffer["state"])
    torch.save(saved, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s[NAME].update(muon_momentum=s[NAME]["muon_momentum"].bfloat16()),
            f"muon_momentum of {NAME} is torch.bfloat16, not torch.float32",
        ),
        (
            lambda s: s["output_layer.weight"].pop("exp_avg_sq"),
            "output_layer.weight is AdamW's and has no exp_avg_sq",
        ),
    ],
    ids=["bf16", "second moment"],
)
def test_state_that_is_wrong_in_the_torch_format(
    change: Callable[[dict[str, Any]], Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path, "torch")
    _edit(tmp_path, change)
    assert message in faults(tmp_path, capsys)


# --- with a digest ----------------------------------------------------------------------------


def test_files_are_held_against_the_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, "torch")
    seal(tmp_path, truth)
    file = tmp_path / "0_0_0_model_optim.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "is damaged" in faults(tmp_path, capsys, "--hash")
    file.write_bytes(data[:-1])
    assert f"{file} has {len(data) - 1} bytes, {len(data)} were written" in faults(tmp_path, capsys)
    file.unlink()
    assert f"{file} is missing" in faults(tmp_path, capsys)


def test_parameters_are_held_against_the_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, DEFAULT)
    said = {
        name: {"shape": list(t.shape), "optimizer": "adamw"} for name, t in truth["main"].items()
    }
    for name in muon_weights(CASE):
        said[name]["optimizer"] = "muon"
    wrong = {**said, "lost.weight": {"shape": [3, 4], "optimizer": "muon"}}
    wrong[NAME] = {"shape": [260, 97], "optimizer": "muon"}
    wrong["output_layer.weight"] = {**said["output_layer.weight"], "optimizer": "muon"}
    seal(tmp_path, truth, parameters=wrong)
    text = faults(tmp_path, capsys)
    assert "lost.weight is Muon's and has no momentum" in text
    assert f"muon_momentum of {NAME} has 24960 elements, not 25220" in text
    assert "output_layer.weight has state of adamw, but the digest says muon" in text
    assert "output_layer.weight is Muon's and has no momentum" in text
    by_name = DEFAULT == "dp_reshardable"  # then of the main parameter's elements, too
    assert text.count("\n") == 3 + by_name


def test_a_save_that_did_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    digest.begin(tmp_path, {})
    assert "was stopped before its end" in faults(tmp_path, capsys)


def test_a_hash_needs_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    (tmp_path / digest.FILE_NAME).unlink(missing_ok=True)
    assert "no digest to hold hashes against" in faults(tmp_path, capsys, "--hash")
