"""Models whose weights have the same shapes and that compute another function are told apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.mcore.load_check import digest
from support.checkpoints.saving import formats
from support.checkpoints.sealing import saved
from support.models.gpt import Case, Topology
from support.ranks import run

CASE, DP, FORMAT = Case(steps=1), Topology(dp=2), formats()[0]
MOE = replace(CASE, moe=True)
Options = dict[str, Any]


@contextmanager
def another(of_config: Options, of_model: Options) -> Iterator[None]:
    """Within it models are built with these options."""
    from unittest import mock

    from megatron.core.models import gpt as megatrons

    from support.models import gpt

    own_config, own_model = gpt.transformer_config, megatrons.GPTModel

    def config(case: Case, topology: Topology) -> Any:
        own = own_config(case, topology)
        for name, value in of_config.items():
            assert hasattr(own, name), name
            setattr(own, name, value)
        return own

    with (
        mock.patch.object(gpt, "transformer_config", config),
        mock.patch.object(megatrons, "GPTModel", partial(own_model, **of_model)),
    ):
        yield


def loads(case: Case, folder: str, exact: bool, models: list[tuple[Options, Options]]) -> Any:
    """Of each model: the error of its check, and what is printed."""
    import io

    from megatron_muon.mcore.load_check.check import check
    from megatron_muon.mcore.load_check.models import owner
    from support.models.gpt import start

    results = []
    for of_config, of_model in models:
        with another(of_config, of_model):
            built = start(case, DP)
        error = None
        with redirect_stdout(io.StringIO()) as printed:
            try:
                check(owner(built.chunks), folder, exact=exact)
            except Exception as own:
                error = f"{type(own).__name__}: {own}"
        results.append((error, printed.getvalue()))
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(saved, 2, CASE, DP, FORMAT, str(folder))
    return folder


# What is changed of the model, and what the error names.
OTHERS: dict[str, tuple[Options, Options, str]] = {
    "heads": (
        {"num_attention_heads": 12, "num_query_groups": 4, "kv_channels": 8},
        {},
        r"num_attention_heads is 6 there and 12 here; num_query_groups is 2 there and 4 here",
    ),
    "epsilon": ({"layernorm_epsilon": 1e-6}, {}, r"layernorm_epsilon is 1e-05 there and 1e-06"),
    "activation": (
        {"activation_func": torch.nn.functional.silu},
        {},
        r"activation_func is 'gelu' there and 'silu' here",
    ),
    "residual": (
        {"apply_residual_connection_post_layernorm": True},
        {},
        r"apply_residual_connection_post_layernorm is False there and True here",
    ),
    "interleaved": (
        {"rotary_interleaved": True},
        {},
        r"rotary_interleaved is False there and True here",
    ),
    "rope base": ({}, {"rotary_base": 500_000}, r"rotary_base is 10000 there and 500000 here"),
    "rope percent": ({}, {"rotary_percent": 0.5}, r"rotary_percent is 1.0 there and 0.5 here"),
    "rope scaling": ({}, {"rope_scaling": True}, r"rotary_scaling is False there and True here"),
    "interpolation": (
        {},
        {"seq_len_interpolation_factor": 4.0},
        r"rotary_seq_len_interpolation_factor is None there and 4.0 here",
    ),
}


def test_each_is_refused_on_every_rank_with_both_values(checkpoint: Path) -> None:
    models = [(of_config, of_model) for of_config, of_model, _ in OTHERS.values()]
    for results in run(loads, 2, CASE, str(checkpoint), True, models):
        for name, (error, _) in zip(OTHERS, results, strict=True):
            assert re.search(OTHERS[name][2], error or ""), (name, error)
            assert "computes another function" in (error or "")
            assert "--no-muon-checkpoint-digest" in (error or "") and "--finetune" in (error or "")


def test_the_same_model_is_loaded(checkpoint: Path) -> None:
    (results, _) = run(loads, 2, CASE, str(checkpoint), True, [({}, {})])
    assert results == [(None, "")]
    (results, _) = run(loads, 2, CASE, str(checkpoint), True, [({"hidden_dropout": 0.1}, {})])
    assert results == [(None, "")]


def test_weights_alone_load_with_a_warning(checkpoint: Path) -> None:
    (zero,), (one,) = run(loads, 2, CASE, str(checkpoint), False, [({}, {"rotary_base": 500_000})])
    assert zero[0] is None and one == (None, "")
    assert "WARNING" in zero[1] and "rotary_base is 10000 there and 500000 here" in zero[1]


def test_of_experts_the_routers_settings_count(tmp_path: Path) -> None:
    run(saved, 2, MOE, DP, FORMAT, str(tmp_path))
    models: list[tuple[Options, Options]] = [
        ({"moe_router_topk": 1}, {}),
        ({"moe_router_pre_softmax": True}, {}),
        ({"moe_aux_loss_coeff": 0.1}, {}),
    ]
    (results, _) = run(loads, 2, MOE, str(tmp_path), True, models)
    assert "moe_router_topk is 2 there and 1 here" in (results[0][0] or "")
    assert "moe_router_pre_softmax is False there and True here" in (results[1][0] or "")
    assert results[2] == (None, "")  # how it is trained


def test_a_digest_from_before_this_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    """It has the same format, without the settings and the save."""
    import shutil

    folder = tmp_path / "saved"
    shutil.copytree(checkpoint, folder)
    said = json.loads((folder / digest.FILE_NAME).read_text())
    new = ("format", "complete", "hash", "model", "save")
    digest.finish(folder, {key: value for key, value in said.items() if key not in new})
    (results, _) = run(loads, 2, CASE, str(folder), True, [({}, {"rotary_base": 500_000})])
    assert results == [(None, "")]
