"""LoRA over a frozen base: adapters of dense layers and of experts, Muon's by one
pattern.

Where PYTHONPATH has the ``src`` of a clone of Megatron-Bridge (see test_bridge.py) the
adapters are its own; else they are the linears that it builds, of Megatron's classes
and under its names.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.mcore.routing.param_routing import ADAPTERS
from support import te_on_cpu
from support.models import gpt
from support.models.gpt import Case, Topology, trained
from support.runs.topologies import (
    DP2_EP2,
    ONE,
    PP2_DP2,
    PP2_DP2_EP2,
    TP2_DP2,
    TP2_DP2_EP2,
    TP2_DP2_EP2_ETP1,
)
from support.runs.whole import Whole, differences

RANK = 8
BASE = tuple(
    """
    *.to_wrap.* *norm.weight *.router.* *embeddings.weight output_layer.* *bias
    *_qkv.weight *_proj.weight *_fc?.weight *layer_norm_weight
""".split()
)
DENSE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EXPERTS = ("*.experts.*.linear_fc1", "*.experts.*.linear_fc2")
CASE = Case(frozen=BASE).with_muon(muon_include=(ADAPTERS,))
MOE = replace(CASE, moe=True)


def _is_bridge_here() -> bool:
    return (
        te_on_cpu.TE is not None
        and importlib.util.find_spec("megatron.bridge") is not None
    )


# ------------------------------------------------------------------- on every rank


class _Adapter(torch.nn.Module):
    """The two factors of Megatron-Bridge's ParallelLinearAdapter, as it shards them."""

    def __init__(self, base: Any, path: str, is_row: bool) -> None:
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
        )

        super().__init__()
        options = {
            "config": base.config,
            "bias": False,
            "is_expert": ".experts." in path,
        }
        options["init_method"] = torch.nn.init.xavier_normal_
        sizes = base.input_size, RANK
        self.linear_in = (
            RowParallelLinear(
                *sizes, input_is_parallel=True, skip_bias_add=True, **options
            )
            if is_row
            else ColumnParallelLinear(*sizes, gather_output=True, **options)
        )
        self.linear_out = ColumnParallelLinear(
            RANK, base.output_size, gather_output=is_row, **options
        )


def _standin(model: Any, targets: tuple[str, ...]) -> Any:
    """``LoRA(targets)(model)``: a wrapper of each linear, with it in ``to_wrap``."""
    for path, base in list(model.named_modules()):
        holder, _, leaf = path.rpartition(".")
        if any(target == leaf or fnmatch(path, target) for target in targets):
            wrapper = torch.nn.Module()
            wrapper.to_wrap = base
            wrapper.adapter = _Adapter(
                base, path, type(base).__name__ == "RowParallelLinear"
            )
            setattr(model.get_submodule(holder), leaf, wrapper)
    return model


def _adapted(model: Any, targets: tuple[str, ...]) -> Any:
    if not _is_bridge_here():
        return _standin(model, targets)
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=list(targets), dim=RANK)(model)


@contextmanager
def _lora(targets: tuple[str, ...]) -> Iterator[None]:
    base = gpt.gpt
    with mock.patch.object(gpt, "gpt", lambda *args: _adapted(base(*args), targets)):
        yield


# ------------------------------------------------------------------- from the test's process


@cache
def _one_process(case: Case, targets: tuple[str, ...]) -> Whole:
    return trained(case, ONE, partial(_lora, targets))


def _check(case: Case, targets: tuple[str, ...], topology: Topology) -> Whole:
    """Its adapters are Muon's and all that trains, and every topology has one process's
    bits.
    """
    whole = trained(case, topology, partial(_lora, targets))
    adapters = {name for name in whole["params"] if fnmatch(name, ADAPTERS)}
    assert adapters and whole["main"].keys() == adapters and "exp_avg_sq" not in whole
    assert differences(_one_process(case, targets), whole) == []
    return whole


@pytest.mark.parametrize("topology", [TP2_DP2, PP2_DP2])
def test_adapters_over_a_frozen_base(topology: Topology) -> None:
    _check(CASE, DENSE, topology)


@pytest.mark.parametrize("topology", [DP2_EP2, TP2_DP2_EP2_ETP1, TP2_DP2_EP2])
def test_experts_adapters_alone(topology: Topology) -> None:
    """Nothing dense trains. Expert TP splits the factors as Megatron's marks say."""
    _check(MOE, EXPERTS, topology)


def test_a_stage_in_which_nothing_trains() -> None:
    """The first one has no experts."""
    _check(replace(MOE, dense_layers=1), EXPERTS, PP2_DP2_EP2)


@pytest.mark.skipif(not _is_bridge_here(), reason="no Megatron-Bridge on the path")
def test_an_adapter_that_all_experts_of_a_layer_share() -> None:
    """Bridge's for grouped experts: each EP rank has a copy, and all copies take the
    same steps.
    """
    grouped = ("*.experts.linear_fc1", "*.experts.linear_fc2")
    _check(replace(MOE, grouped="te"), grouped, DP2_EP2)
