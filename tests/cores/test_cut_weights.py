"""The norm counts each weight once, whatever its shape and whether or not Megatron
marks it.

A weight is cut where its shape at TP 2 is another than at TP 1: real modules on the
meta device say so, for models of all kinds, some of whose kernels have stand-ins.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from support.installed import VERSION
from support.models.meta_models import MODELS
from support.processes import python

SINCE = {
    "sinks": (0, 15),
    "Mamba with experts": (0, 15),
    "indexer": (0, 18),
    **dict.fromkeys(("output gate", "one group", "experts", "latent experts"), (0, 16)),
    "delta nets": (0, 16),
    "delta nets 2": (0, 20),
    **dict.fromkeys(("hyper-connections", "delta products"), (0, 20)),
}


@cache
def _found() -> Any:
    names = [name for name in MODELS if VERSION >= SINCE.get(name, VERSION)]
    ended = python("-m", "support.models.meta_models", *names)
    return json.loads(ended.stdout) if ended.returncode == 0 else ended.stderr[-3000:]


@pytest.mark.parametrize("name", MODELS)
def test_a_weight_counts_on_all_tp_ranks_just_if_tp_cuts_it(name: str) -> None:
    if VERSION < SINCE.get(name, VERSION):
        pytest.skip("this core has no such model")
    assert isinstance(_found(), dict), _found()
    weights = _found()[name]
    assert any(cut for cut, _ in weights.values()) and not all(
        cut for cut, _ in weights.values()
    )
    assert {
        weight: cut for weight, (cut, counted) in weights.items() if cut != counted
    } == {}
