"""What a load or a save refuses, in each of Megatron's formats: one error on every
rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import reading_muon
from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw
from support.checkpoints.resuming import check
from support.checkpoints.saving import (
    error_of_load,
    error_of_save,
    formats,
    load,
    save_new,
)
from support.installed import VERSION
from support.models.gpt import Case, Topology, on_ranks, start
from support.ranks import error_of, run
from support.runs.topologies import DP2, DP4_INSTANCES2, PP2, TP2, TP2_DP2

BF16 = Case()
DEFAULT, *OTHERS = formats()
EVERY = [DEFAULT, *OTHERS]
(MODEL_SPACE,) = (format for format in EVERY if format.startswith("fully"))


@pytest.mark.parametrize("format", EVERY)
def test_an_adamw_checkpoint_is_refused(format: str, tmp_path: Path) -> None:
    on_ranks(save_new, replace(BF16, optimizer="adam"), DP2, format, tmp_path)
    for text in on_ranks(error_of_load, BF16, DP2, format, tmp_path):
        assert re.search(
            r"[.]muon_momentum[.]|[.]megatron_muon[./]|saved by megatron_muon.s Muon",
            text,
        )


@pytest.mark.parametrize("format", EVERY)
def test_adamw_refuses_a_muon_checkpoint(format: str, tmp_path: Path) -> None:
    """TP 2: with DP ranks that wait for the first one, it ends when that one does."""
    on_ranks(save_new, BF16, TP2, format, tmp_path)
    adam = replace(BF16, optimizer="adam")
    for text in on_ranks(error_of_load, adam, TP2, format, tmp_path):
        assert "exp_avg" in text


@pytest.mark.parametrize("how", ["gone", "cut off"])
def test_a_missing_file_is_an_error_everywhere_and_no_hang(
    how: str, tmp_path: Path
) -> None:
    on_ranks(save_new, BF16, DP2, "torch", tmp_path)
    file = tmp_path / "0_0_0_distrib_optim.pt"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    for text in on_ranks(error_of_load, BF16, DP2, "torch", tmp_path):
        assert file.name in text and ("is missing" in text or "is truncated" in text), (
            text
        )


def _load_what_rank_0_cannot_read(
    was: str, case: Case, topology: Topology, folder: Path, how: str
) -> None:
    built = start(case, topology)
    own = torch.load

    def fails(file: Any, *args: Any, **kwargs: Any) -> Any:
        if how == "OSError" and "0_0_0_distrib_optim" in str(file):
            raise OSError(5, "Input/output error")
        return own(file, *args, **kwargs)

    with ExitStack() as loading:
        loading.enter_context(mock.patch.object(torch, "load", fails))
        if was == "adam":
            loading.enter_context(reading_adamw(built.optimizer, "momentum"))
        elif case.optimizer == "adam":
            loading.enter_context(reading_muon(built.optimizer, {}))
        load(built, folder, "torch")


def _error_of_what_rank_0_cannot_read(*args: Any) -> str:
    return error_of(lambda: _load_what_rank_0_cannot_read(*args))


@pytest.mark.parametrize(
    ("was", "now", "how", "topology"),
    [
        ("muon", "muon", "data.pkl", DP2),
        ("adam", "muon", "data.pkl", TP2_DP2),
        ("adam", "muon", "OSError", DP2),
        ("muon", "adam", "data.pkl", DP2),
    ],
)
def test_a_file_that_torch_cannot_read_ends_all_ranks_with_torchs_words(
    was: str, now: str, how: str, topology: Topology, tmp_path: Path
) -> None:
    size = topology.world_size
    on_ranks(save_new, replace(BF16, optimizer=was), topology, "torch", tmp_path)
    if how == "data.pkl":
        file = tmp_path / "0_0_0_distrib_optim.pt"
        at = file.read_bytes().index(b"\x80\x02}q") + 8
        with file.open("r+b") as damaged:  # the table of contents is at its end
            damaged.seek(at)
            damaged.write(bytes(30))
    case = replace(BF16, optimizer=now)
    given = (
        _error_of_what_rank_0_cannot_read,
        size,
        was,
        case,
        topology,
        tmp_path,
        how,
    )
    first, *others = run(*given, timeout=30.0)
    assert first.startswith(
        "UnpicklingError: " if how == "data.pkl" else "OSError: "
    ), first
    for text in others:
        assert text == (
            f"RuntimeError: rank 0 stopped this run: {first.removeprefix('OSError: ')}"
        )


def _edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "0_0_0_distrib_optim.pt"
    saved = torch.load(file)
    (buffer,) = saved[0].values()
    change(buffer["state"])
    torch.save(saved, file)


NAME = "decoder.layers.1.mlp.linear_fc1.weight"
# Megatron stacks the layers of some versions into one tensor
STORED = "mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(NAME), f"no muon_momentum of {NAME}, only: nothing"),
        (
            lambda s: s.update({NAME: {"exp_avg": s[NAME]["muon_momentum"]}}),
            f"no muon_momentum of {NAME}, only: exp_avg",
        ),
        (
            lambda s: s[NAME].update(muon_momentum=s[NAME]["muon_momentum"].bfloat16()),
            f"muon_momentum of {NAME} is torch.bfloat16 on disk, torch.float32 here",
        ),
        (
            lambda s: s[NAME].update(muon_momentum=s[NAME]["muon_momentum"][:-1]),
            f"muon_momentum of {NAME} has 24959 elements on disk, 24960 here",
        ),
        (
            lambda s: s.update(other={}),
            "has state of other, which is not in this model",
        ),
    ],
    ids=["missing", "adamws", "bf16", "short", "unknown"],
)
def test_a_wrong_momentum_is_refused_on_every_rank(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    on_ranks(save_new, BF16, DP2, "torch", tmp_path)
    _edited(tmp_path, change)
    texts = on_ranks(error_of_load, BF16, DP2, "torch", tmp_path)
    assert [message in text for text in texts] == [True, True], texts
    assert texts[1].startswith("RuntimeError: rank 0 stopped this run")


@pytest.mark.parametrize("format", EVERY)
def test_a_parameter_that_was_adamws_is_refused(format: str, tmp_path: Path) -> None:
    """Of all layers: fully_reshardable has them in one tensor. No digest has named the
    setting.
    """
    before = BF16.with_muon(muon_exclude=("*.linear_fc1.weight",))
    on_ranks(save_new, before, DP2, format, tmp_path)
    for text in on_ranks(error_of_load, BF16, DP2, format, tmp_path):
        assert STORED in text and ("muon_momentum" in text or format == "torch"), text
        assert format != "torch" or "muon_exclude (--muon-exclude)" in text


# --- what Megatron cannot do ----------------------------------------------------------


def test_layers_of_both_in_one_tensor_are_refused(tmp_path: Path) -> None:
    """On the second stage alone a layer is AdamW's: the stages must compare."""
    case = BF16.with_muon(muon_exclude=(NAME,))
    for text in on_ranks(error_of_save, case, PP2, MODEL_SPACE, tmp_path):
        assert (
            "mlp.linear_fc1.weight of all layers in one tensor, but Muon updates some"
            in text
        )


def test_layers_of_both_in_other_formats(tmp_path: Path) -> None:
    case = BF16.with_muon(muon_exclude=(NAME,))
    check(case, DP2, DEFAULT, tmp_path)


def test_instances_in_the_oldest_format_are_refused(tmp_path: Path) -> None:
    args = (BF16, DP4_INSTANCES2, "dp_zero_gather_scatter", tmp_path)
    for text in run(error_of_save, 4, *args):
        assert "first of several optimizer instances only" in text


@pytest.mark.skipif(VERSION >= (0, 15), reason="gone from Megatron")
def test_bucket_space_is_refused(tmp_path: Path) -> None:
    args = (BF16, DP2, "fully_sharded_bucket_space", tmp_path)
    for text in run(error_of_save, 2, *args):
        assert "does not save or load fully_sharded_bucket_space" in text
