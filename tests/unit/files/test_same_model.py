"""Whether a checkpoint is of the model that loads it, by its digest."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_muon.mcore.checkpoint import read
from megatron_muon.mcore.load_check import digest, same_model
from megatron_muon.mcore.load_check.digest import DigestError
from megatron_muon.mcore.load_check.regular_files import irregular


def _digest(shapes: dict[str, list[int]], settings: dict[str, Any]) -> dict[str, Any]:
    table = {name: {"shape": shape, "optimizer": "muon"} for name, shape in shapes.items()}
    return {"parameters": table, "model": settings, "vocabulary": None}


def _changed(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    return same_model.check_model(_digest({}, saved), ({}, own), None, "folder")[1]


@pytest.mark.parametrize(
    ("name", "one", "two", "same"),
    [
        ("moe_router_topk_scaling_factor", 2.446, 2.448, False),
        ("rotary_base", 10000.0, 10009.0, False),
        ("layernorm_epsilon", 1e-5, 1e-5, True),
        ("rotary_frequencies", [32, 0.7, 1e-4], [32, 0.7002, 1e-4], True),
    ],
)
def test_only_computed_values_may_differ_by_rounding(
    name: str, one: Any, two: Any, same: bool
) -> None:
    assert (_changed({name: one}, {name: two}) == []) == same


def test_one_weight_of_experts_is_compared_by_its_shape() -> None:
    name, other = "layers.0.mlp.experts.weight1", "layers.0.mlp.experts.linear_fc1.weight"
    with pytest.raises(DigestError, match=r"has the shape \(64, 4096\) there and \(128, 2048\)"):
        same_model.check_model(
            _digest({name: [64, 4096]}, {}),
            (_digest({name: [128, 2048]}, {})["parameters"], {}), None, "folder",
        )  # fmt: skip
    split = _digest({f"{other}{number}": [128, 1024] for number in range(2)}, {})["parameters"]
    same_model.check_model(_digest({name: [64, 4096]}, {}), (split, {}), None, "folder")
    del split[f"{other}1"]
    split[f"{other}0"]["shape"], split[f"{other}2"] = [128, 1000], split[f"{other}0"]
    with pytest.raises(DigestError, match="number of elements 262144 there"):
        same_model.check_model(_digest({name: [64, 4096]}, {}), (split, {}), None, "folder")


def test_a_setting_without_effect_is_not_recorded() -> None:
    dense = SimpleNamespace(num_moe_experts=None, multi_latent_attention=False)
    moe = SimpleNamespace(num_moe_experts=8, multi_latent_attention=True)
    absolute, rope = (
        SimpleNamespace(position_embedding_type=kind) for kind in ("learned_absolute", "rope")
    )
    in_force = same_model._is_in_force
    assert not in_force("moe_router_topk", dense, rope) and in_force("moe_router_topk", moe, rope)
    assert not in_force("rotary_base", dense, absolute) and in_force("rotary_base", dense, rope)
    assert not in_force("kv_channels", moe, rope) and in_force("kv_channels", dense, rope)
    assert not in_force("window_attn_skip_freq", dense, rope)
    assert in_force("hidden_size", dense, absolute)


@pytest.mark.parametrize("name", ["../other.bin", "/etc/passwd", ""])
def test_a_digest_names_no_file_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    digest.finish(tmp_path, {"files": {name: {"size": 1, "hash": "crc32:0"}}})
    with pytest.raises(DigestError, match="its values are not those of a digest"):
        digest.read(tmp_path)


def test_earlier_versions_read_who_saves() -> None:
    kinds = {"id": str, "host": str, "began": str, "pid": int, "job": dict}
    assert {key: type(value) for key, value in digest.new_save().items()} == kinds


def test_a_link_that_nobody_can_follow_is_skipped(tmp_path: Path) -> None:
    os.symlink("x" * 300, tmp_path / "link")
    assert list(irregular(tmp_path)) == []


def test_a_variable_that_refuses_every_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(read.ReadError, match="TORCH_FORCE_WEIGHTS_ONLY_LOAD is set"):
        read.load(tmp_path / "any")
