"""Whether a checkpoint is of the model that loads it, by its digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.load_check import digest, same_model
from megatron_muon.mcore.load_check.digest import DigestError


def _digest(shapes: dict[str, list[int]]) -> dict[str, Any]:
    table = {name: {"shape": shape, "optimizer": "muon"} for name, shape in shapes.items()}
    return {"parameters": table}


def _require(saved: dict[str, list[int]], own: dict[str, list[int]], exact: bool = True) -> None:
    table = _digest(own)["parameters"]
    same_model.require_same_model(_digest(saved), table, "folder", exact)


def test_one_weight_of_experts_is_compared_by_its_shape() -> None:
    name, other = "layers.0.mlp.experts.weight1", "layers.0.mlp.experts.linear_fc1.weight"
    with pytest.raises(DigestError, match=r"has the shape \(64, 4096\) there and \(128, 2048\)"):
        _require({name: [64, 4096]}, {name: [128, 2048]})
    _require({name: [64, 4096]}, {f"{other}0": [128, 1024], f"{other}1": [128, 1024]})
    with pytest.raises(DigestError, match="number of elements 262144 there"):
        _require({name: [64, 4096]}, {f"{other}0": [128, 1000], f"{other}2": [128, 1024]})


def test_weights_alone_load_into_a_part_of_the_model() -> None:
    saved = {"one.weight": [4, 4], "two.weight": [4, 4]}
    with pytest.raises(DigestError, match=r"it has two\.weight, which this model lacks"):
        _require(saved, {"one.weight": [4, 4]})
    _require(saved, {"one.weight": [4, 4]}, exact=False)


def test_a_digest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has the same format: with more about the model, and before that without the save."""
    more = {"model": {"rotary_base": 10000}, "vocabulary": 128}
    digest.finish(tmp_path, {"parameters": {}, "files": {}, **more})
    earlier = digest.read(tmp_path)
    assert earlier is not None and earlier["complete"] and earlier["save"] is None


def test_earlier_versions_read_who_saves() -> None:
    kinds = {"id": str, "host": str, "began": str, "pid": int, "job": dict}
    assert {key: type(value) for key, value in digest.new_save().items()} == kinds
