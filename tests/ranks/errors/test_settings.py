"""Ranks that ask for different things: an error that names the setting, on each, before
a hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from megatron_muon import MuonConfig
from support.installed import installed
from support.models.gpt import Case, build, error_of_building
from support.ranks import error_of, run
from support.runs.topologies import DP2
from support.settings import OTHERS

# What both ranks ask for, where it is not that rank 1 alone asks for another value.
BOTH = {"block_lr_mult": [{"full_period": 5}, {"full_period": 5, "block_lr_mult": 0.5}]}
BOTH["momentum_start"] = [
    {"momentum_warmup": 3},
    {"momentum_warmup": 3, "momentum_start": 0.5},
]
BOTH["radii"] = [{"rule": "hyperball"}, {"rule": "hyperball", "radii": OTHERS["radii"]}]
for moment in ("moment2_beta2", "moment2_eps"):
    of_rule = {"rule": "normuon"}
    BOTH[moment] = [of_rule, {**of_rule, moment: OTHERS[moment]}]
MEGATRONS = {
    "OptimizerConfig": OptimizerConfig,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
}
# A bucket's size may follow a stage's parameters, and a rank may log into a folder of
# its own.
MAY_DIFFER = {"optimizer", "bucket_size", "config_logger_dir"}
FIELDS = [
    *(("setting", field.name) for field in dataclasses.fields(MuonConfig)),
    *(
        (kind, field.name)
        for kind, config in MEGATRONS.items()
        for field in dataclasses.fields(config)
        if field.name not in MAY_DIFFER
    ),
    *(("model", name) for name in ("qk_clip", "log_max_attention_logit")),
]
CASE = Case(layers=1, steps=1)


def _another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (list, tuple)):
        return type(value)([*value, "another"])
    if isinstance(value, float):  # it may be infinite
        return 0.5 if value != 0.5 else 0.25
    return (
        torch.float16 if isinstance(value, torch.dtype) else value * 2 + type(value)(1)
    )


def _error(chunk: Any, config: OptimizerConfig, **settings: Any) -> str:
    """Of asking for the optimizer, as if the plugin was installed with these
    settings.
    """
    from megatron.core import optimizer as mcore_optimizer

    from megatron_muon.mcore.wiring import install

    with mock.patch.object(install, "_config", MuonConfig(**settings)):
        return error_of(lambda: mcore_optimizer.get_megatron_optimizer(config, [chunk]))


def _config(optimizer: str = "muon") -> OptimizerConfig:
    return OptimizerConfig(
        optimizer=optimizer, lr=0.1, bf16=True, use_distributed_optimizer=True
    )


def _errors() -> dict[tuple[str, str], str]:
    """This rank's error for each of ``FIELDS``, which is another on rank 1."""
    chunk = build(CASE, DP2).ddp
    odd = dist.get_rank() == 1
    texts = {}
    with installed():
        for kind, name in FIELDS:
            config, asked = _config(), {}
            if kind == "setting":
                asked = BOTH.get(name, [{}, {name: OTHERS[name]}])[odd]
            elif odd:
                owner = {"OptimizerConfig": config, "model": chunk.config}.get(kind)
                owner = owner or chunk.ddp_config
                value = getattr(owner, name, None)
                setattr(owner, name, _another(value))
            texts[kind, name] = _error(chunk, config, **asked)
            if odd and kind != "setting":
                setattr(owner, name, value)
    return texts


@pytest.fixture(scope="module")
def texts_of_ranks() -> list[dict[tuple[str, str], str]]:
    return run(_errors, 2, timeout=60.0)


@pytest.mark.parametrize("field", FIELDS, ids=".".join)
def test_a_setting_of_one_rank_is_named_on_every_rank(
    field: tuple[str, str], texts_of_ranks: list[dict[tuple[str, str], str]]
) -> None:
    kind, name = field
    said = (
        f"{name} of the model"
        if kind == "model"
        else f"{kind}{'. '[kind == 'setting']}{name}"
    )
    for texts in texts_of_ranks:
        assert texts[field].startswith(
            f"PlanMismatchError: ranks disagree, first at {said}: rank 1 has"
        ), texts[field]


def _let_the_other_come_first() -> None:
    dist.distributed_c10d._get_default_store().wait(["megatron_muon/settings/1"])


def _error_among_adamws(asks: str) -> str:
    """Rank 1 asks nothing of the plugin, and comes later."""
    chunk = build(CASE, DP2).ddp
    odd = dist.get_rank() == 1
    if odd:
        _let_the_other_come_first()
    settings = {"qk_clip": 100.0} if asks == "setting qk_clip" and not odd else {}
    config = _config("muon" if asks == "optimizer" and not odd else "adam")
    with installed():
        return _error(chunk, config, **settings)


@pytest.mark.parametrize("asks", ["optimizer", "setting qk_clip"])
def test_a_rank_that_asks_nothing_of_the_plugin_gets_the_error_too(asks: str) -> None:
    for text in run(_error_among_adamws, 2, asks, timeout=30.0):
        assert f"ranks disagree, first at {asks}: rank 1 has" in text, text


def _error_of_comparing(first: str, second: str) -> str:
    """Rank 1 comes later; a rank of ``nobody`` does not come."""
    from megatron_muon.runtime.consensus import agree_on_settings

    rank = dist.get_rank()
    who = (first, second)[rank]
    if who == "nobody":
        return "does not come"
    if rank == 1:
        _let_the_other_come_first()
    lines = [f"optimizer: {who}"]
    return error_of(lambda: agree_on_settings(lines, asks=who == "muon"))


def test_adamw_waits_for_no_rank_and_muon_for_no_adamw() -> None:
    assert run(_error_of_comparing, 2, "adam", "nobody", timeout=30.0)[0] == "no error"
    assert run(_error_of_comparing, 2, "adam", "adam", timeout=30.0) == ["no error"] * 2
    adam, muon = run(_error_of_comparing, 2, "adam", "muon", timeout=30.0)
    # it is in Megatron's hands by then, and ends when the other does
    assert adam == "no error"
    assert "first at optimizer: rank 1 has muon where rank 0 has adam" in muon


def _error_of_initializing(asks: bool) -> str:
    """In Megatron-LM, before the model is built; rank 1 asks for AdamW, and comes
    later.
    """
    from megatron_muon.megatron_lm import install

    rank = dist.get_rank()
    if rank == 1 and not asks:
        return "does not come"
    if rank == 1:
        _let_the_other_come_first()
    is_muon = asks and rank == 0
    args = SimpleNamespace(optimizer="muon" if is_muon else "adam")
    training = SimpleNamespace(get_args=lambda: args)
    with mock.patch.dict(sys.modules, {"megatron.training": training}):
        with installed() if is_muon else contextlib.nullcontext():
            return error_of(lambda: install._initialize_megatron(lambda: None))


def test_megatron_lms_ranks_compare_flags_as_soon_as_they_can() -> None:
    for text in run(_error_of_initializing, 2, True, timeout=30.0):
        assert "first at optimizer: rank 1 has 'adam' where rank 0 has 'muon'" in text
    assert run(_error_of_initializing, 2, False, timeout=30.0) == [
        "no error",
        "does not come",
    ]


def _errors_of_flags() -> dict[str, str]:
    """Of flags that rank 1 alone has."""
    from megatron_muon.megatron_lm import install
    from megatron_muon.settings.run_flags import OF_ADAMW

    texts = {}
    for dest in (*install._AGREED, *OF_ADAMW, "load", "save"):
        given = {dest: "given"} if dist.get_rank() == 1 else {}
        args = SimpleNamespace(optimizer="muon", **given)
        training = SimpleNamespace(get_args=lambda args=args: args)
        with mock.patch.dict(sys.modules, {"megatron.training": training}), installed():
            texts[dest] = error_of(lambda: install._initialize_megatron(lambda: None))
    return texts


def test_a_flag_of_one_rank_that_a_load_or_a_trace_depends_on_is_named() -> None:
    for texts in run(_errors_of_flags, 2, timeout=30.0):
        for dest, text in texts.items():
            assert f"first at --{dest.replace('_', '-')}: rank 1 has" in text


def _without_a_kernel() -> str:
    """Of building where a kernel is missing on rank 1."""
    from megatron_muon.orthogonalize import matmul

    missing = matmul.KernelError.of(ImportError("it is not installed"), "triton")
    if dist.get_rank() == 0:
        return error_of_building(CASE, DP2, {})
    with mock.patch.object(matmul, "multiplies_bf16", side_effect=missing):
        return error_of_building(CASE, DP2, {})


def test_a_kernel_that_one_node_lacks_ends_all_ranks() -> None:
    for text in run(_without_a_kernel, 2, timeout=60.0):
        assert "products torch: torch's matmul takes its place" in text
