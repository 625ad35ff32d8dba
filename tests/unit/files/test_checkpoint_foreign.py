"""Checkpoints of others: what a run reads of one before Megatron does, and who wrote
it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_muon.mcore.checkpoint.buffers import states_of
from megatron_muon.mcore.checkpoint.interop.foreign import (
    Source,
    as_ours,
    is_megatrons,
)
from megatron_muon.mcore.checkpoint.interop.saved import _KNOWN, Saved
from megatron_muon.mcore.checkpoint.matrices import require_record
from megatron_muon.mcore.checkpoint.param_groups import check_record, config_of
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings.config import MuonConfig

FC1 = "decoder.layers.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"
KEYS = [
    FC1,
    EMBEDDING,
    f"optimizer.state.fp32_param.{FC1}",
    f"optimizer.state.momentum_buffer.{FC1}",
    f"chained_1.optimizer.state.fp32_param.{EMBEDDING}",
    f"chained_1.optimizer.state.exp_avg.{EMBEDDING}",
    f"chained_1.optimizer.state.exp_avg_sq.{EMBEDDING}",
]
COMMON = {"lr_mult": 1.0, "wd_mult": 1.0}
COMMON |= dict.fromkeys(("is_expert_parallel", "is_decoupled_lr"), False)
MOMENTUM = {**COMMON, "momentum": 0.9}
ADAMW = {**COMMON, "betas": (0.8, 0.9), "eps": 1e-7, "step": 3}
STATES = {
    0: {"optimizer": {"param_groups": [MOMENTUM]}},
    1: {"optimizer": {"param_groups": [ADAMW]}},
}
CONCEPT = {"optimizer": {"param_groups": [ADAMW, {**COMMON, "use_muon": True}]}}


def test_each_writer_is_known() -> None:
    assert is_megatrons(KEYS, states_of(STATES), [])
    ours = {"optimizer": {"param_groups": [ADAMW]}, "megatron_muon": {}}
    assert not is_megatrons(
        [f"optimizer.state.muon_momentum.{FC1}"], [ours], ["common.pt"]
    )
    assert not is_megatrons([f"optimizer.state.exp_avg.{FC1}"], [], [])
    sgd = [{"optimizer": {"param_groups": [{**MOMENTUM, "dampening": 0}]}}]
    assert not is_megatrons(KEYS[:4], sgd, []) and not is_megatrons([], sgd, [])


# torch's own state dicts
FP32 = {number: state["optimizer"] for number, state in STATES.items()}


@pytest.mark.parametrize(
    ("saved", "file"),
    [
        (CONCEPT, "distrib_optim.pt"),
        (STATES, "layer_wise_optimizer_0.pt"),
        (STATES, "model_optim_rng.pt"),
        (FP32, "model_optim_rng.pt"),
    ],
)
def test_state_without_names_is_refused(saved: Any, file: str) -> None:
    with pytest.raises(
        ValueError, match=r"which weights were Muon's.*--ckpt-format torch_dist"
    ):
        is_megatrons([], states_of(saved), [file])


def test_chains_may_be_nested() -> None:
    assert states_of([[{"a": 1}], {0: {"b": 2}}, None]) == [{"a": 1}, {"b": 2}]


def test_adamws_in_buckets_is_named() -> None:
    """As core 0.18 and later have it by default; without a main parameter the weight is
    none.
    """
    buckets = (
        "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"
    )
    source = Source([*KEYS[:4], buckets], states_of(STATES))
    for what in ("param", "exp_avg"):
        with pytest.raises(
            ValueError, match=r"flat buckets.*--dist-ckpt-optim-fully-reshardable"
        ):
            source.of(f"optimizer.state.{what}.{EMBEDDING}")


def test_a_distributed_optimizers_main_parameter_has_another_name() -> None:
    keys = [*KEYS[:4], f"chained_1.chained_0.optimizer.state.param.{EMBEDDING}"]
    source = Source(keys, states_of(STATES))
    assert source.of(f"optimizer.state.param.{EMBEDDING}") == keys[4]


def test_state_of_another_optimizers_is_refused() -> None:
    """The second moment of their adaptive_muon is only not read."""
    kinds = "moment2_buffer", "square_avg"
    keys = [*KEYS, *(f"optimizer.state.{kind}.{FC1}" for kind in kinds)]
    with pytest.raises(
        ValueError, match=f"has square_avg of {FC1}, which neither Muon here"
    ):
        Source(keys, states_of(STATES))


@pytest.mark.parametrize("coefficients", [(), (0.9, 0.95)])
def test_several_momentum_coefficients_are_an_error(
    coefficients: tuple[float, ...],
) -> None:
    groups = [{**COMMON, "momentum": mu} for mu in coefficients]
    with pytest.raises(ValueError, match="must have one momentum coefficient"):
        Source(KEYS, [{"optimizer": {"param_groups": groups}}])


def test_an_fp32_models_state_dict_is_torchs_own() -> None:
    states = states_of(FP32)
    first, *_ = as_ours(states, MuonConfig())["optimizer"]["param_groups"]
    assert first["step"] == 3 and Source(KEYS, states).mu == 0.9


def test_torchs_adamw_has_its_step_elsewhere() -> None:
    state = {"param_groups": [MOMENTUM]}
    states = [{"optimizer": {**state, "state": {"common_step": 12}}}]
    group, _ = as_ours(states, MuonConfig())["optimizer"]["param_groups"]
    assert group["step"] == 12


MODEL = "model_optim_rng.pt"
EVERY_FILE = pytest.mark.parametrize("name", [".metadata", "common.pt", MODEL])


def _place(checkpoint: Path, name: str) -> Path:
    """Where a file of a checkpoint lies, beside the others of its format."""
    if name == MODEL:
        checkpoint /= "mp_rank_00"
        checkpoint.mkdir()
    elif name == "common.pt":
        save({"weight": torch.ones(1)}, storage_writer=FileSystemWriter(checkpoint))
    return checkpoint / name


@EVERY_FILE
@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"\x80\x02K\x01."])
def test_a_damaged_file_is_named(name: str, data: bytes, tmp_path: Path) -> None:
    _place(tmp_path, name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} cannot be read: "):
        Saved.of(tmp_path)


class _Hostile:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.mark),)


@EVERY_FILE
def test_no_name_in_a_file_chooses_code_that_runs(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = _place(tmp_path, name)
    groups = {"param_groups": [{"lr": 1.0, "odd": _Hostile(mark)}]}
    if name == ".metadata":
        path.write_bytes(pickle.dumps(_Hostile(mark)))
        with pytest.raises(ValueError, match="cannot be read"):
            Saved.of(tmp_path)
    else:
        torch.save({"optimizer": groups}, path)
        (state,) = Saved.of(tmp_path).states
        assert state["param_groups"][0]["lr"] == 1.0
        with pytest.raises(ValueError, match="a group's odd is of a class, mkdir"):
            Saved.of(tmp_path).require_plain_groups()
    assert not mark.exists()


def test_a_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no checkpoint in it"):
        Saved.of(tmp_path)


# class, None, {"owned": 1}, of which BUILD takes the dict as attributes
SETS_ATTRIBUTE = b"N}X\x05\x00\x00\x00ownedK\x01s\x86b."
CLASSES = [
    (module, name)
    for module, names in _KNOWN.items()
    for name in names
    if isinstance(getattr(importlib.import_module(module), name), type)
]


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=str)
def test_no_file_sets_an_attribute_of_a_class(
    module: str, name: str, tmp_path: Path
) -> None:
    """By BUILD, which pickle runs on whatever lies on its stack."""
    found = getattr(importlib.import_module(module), name)
    data = b"\x80\x04c" + f"{module}\n{name}\n".encode() + SETS_ATTRIBUTE
    (tmp_path / ".metadata").write_bytes(data)
    try:
        with pytest.raises(ValueError, match="cannot be read"):
            Saved.of(tmp_path)
        assert not hasattr(found, "owned")
    finally:
        with contextlib.suppress(AttributeError, TypeError):
            del found.owned


ODD: list[Any] = [5, None, "text", [1], {1: 2}, object]


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("key", ["state_dict_metadata", "storage_data"])
def test_metadata_of_odd_types_are_named(key: str, odd: Any, tmp_path: Path) -> None:
    save(
        {"common_state/shard_0_1": io.BytesIO()},
        storage_writer=FileSystemWriter(tmp_path),
    )
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    setattr(metadata, key, odd)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"cannot be read: |has no"):
        _ = Saved.of(tmp_path).keys, Saved.of(tmp_path).record()


@pytest.mark.parametrize("odd", [5, "text", [1], {1: 2}, {}, object], ids=str)
def test_a_record_of_odd_types_is_named(odd: Any, tmp_path: Path) -> None:
    state = {"optimizer": {"param_groups": []}, "megatron_muon": odd}
    torch.save({"optimizer": state}, _place(tmp_path, MODEL))
    with pytest.raises(ValueError, match=r"record .*is damaged"):
        require_record(Saved.of(tmp_path).record())
    saved = {"megatron_muon": odd}
    with pytest.raises(ValueError, match=r"is damaged|is of format"):
        check_record(saved, Numerics(MuonConfig(), "cpu"), None)


@pytest.mark.parametrize("odd", [5, "text", [5], ["text"], {1: 2}], ids=str)
def test_groups_of_odd_types_are_named(odd: Any, tmp_path: Path) -> None:
    state = {"optimizer": {"param_groups": odd}}
    torch.save({"optimizer": state}, _place(tmp_path, MODEL))
    with pytest.raises(ValueError, match=r"model_optim_rng\.pt cannot be read"):
        Saved.of(tmp_path)


SETTINGS = """
{"ns_coefficients": 5}
{"ns_coefficients": [["a"]]}
{"ns_steps": "five"}
{"ns_steps": null}
{"muon_include": 5}
{"muon_exclude": [5]}
"""


@pytest.mark.parametrize("text", SETTINGS.strip().splitlines())
def test_settings_of_odd_types_are_named(text: str) -> None:
    """Where AdamW takes them over, and where Muon compares."""
    odd = json.loads(text)
    (name,) = odd
    if name.startswith("muon_"):
        with pytest.raises((ValueError, TypeError), match=name):
            config_of(odd)
    saved = {"megatron_muon": {"format": 1, "settings": odd, "matrices": {}}}
    with pytest.raises(ValueError, match=name):
        check_record(
            saved,
            Numerics(MuonConfig(), "cpu"),
            {"w": {"1 x 1": 1}} if name.startswith("muon_") else {},
        )


def test_settings_that_have_left_do_not_stop_adamw() -> None:
    """Only the patterns say which weights were Muon's."""
    former = config_of({"rule": "gone", "no such": 1, "muon_exclude": ("*.fc1",)})
    assert former == MuonConfig(muon_exclude=("*.fc1",))
