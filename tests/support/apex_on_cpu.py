"""Apex's own Python without CUDA: its optimizers over a stub of ``amp_C``, which has
their kernels.

pip has no Apex (its ``apex`` is another package), so there is none in CI. With a clone
of github.com/NVIDIA/apex, ``APEX_PATH=... bash tests/run.sh
tests/ranks/te/test_apex.py`` runs over it, as does any other test of the optimizer.
Nothing is compiled; its norms can be made, not called.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import torch

from megatron_muon import cpu
from megatron_muon.cpu import megatron_core

COMPILED = ("amp_C", "fused_layer_norm_cuda", "fast_layer_norm")


def installed() -> bool:
    """Whether the tests run over Apex's Python."""
    spec = None if torch.cuda.is_available() else importlib.util.find_spec("apex")
    folders = (spec and spec.submodule_search_locations) or []
    return any(
        (Path(folder) / "optimizers" / "fused_adam.py").exists() for folder in folders
    )


def install() -> None:
    """Put the stubs in place, before Megatron is imported, which then takes Apex's
    FusedAdam.
    """
    from support.te_on_cpu import adam

    for name in COMPILED:
        sys.modules[name] = types.ModuleType(name)
    for name in ("adam", "scale", "l2norm"):
        setattr(
            sys.modules["amp_C"],
            f"multi_tensor_{name}",
            getattr(adam, f"multi_tensor_{name}"),
        )
    others = (
        "adam_capturable",
        "adam_capturable_master",
        "sgd",
        "novograd",
        "lamb",
        "adagrad",
    )
    for name in (*others, "lamb_mp", "l2norm_mp"):
        setattr(sys.modules["amp_C"], f"multi_tensor_{name}", _not_in_the_stub)
    cpu.REPLACEMENTS = tuple(
        each for each in cpu.REPLACEMENTS if each is not megatron_core.adam
    )


def _not_in_the_stub(*args: object) -> None:
    raise NotImplementedError("of amp_C the stub has Adam, scale and l2norm")
