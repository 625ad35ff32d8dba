"""Runs a script of the proof of concept on the CPU, without the plugin.

``python -m torch.distributed.run ... runs_proof_of_concept.py CHECKOUT SCRIPT ARGUMENTS``. Its core
is before 0.12: what the CPU runtime replaces in later ones is left out, and one module of theirs is
stood in for.
"""

from __future__ import annotations

import functools
import runpy
import sys
import types
from typing import Any

checkout, *sys.argv = sys.argv[1:]
sys.path.insert(0, checkout)

import torch.distributed as dist  # noqa: E402

import megatron_muon.cpu as cpu  # noqa: E402
from megatron_muon.cpu import training  # noqa: E402

LATER = ("dispatcher", "uneven", "router", "grouped", "multi-latent", "context par")
cpu.REPLACEMENTS = tuple(
    each for each in cpu.REPLACEMENTS if not any(word in each.name.lower() for word in LATER)
)
fp8: Any = types.ModuleType("megatron.core.fp8_utils")
fp8._quantize_param_shard_impl = lambda model_params, *rest: None
sys.modules["megatron.core.fp8_utils"] = fp8
cpu.require_core = lambda: None  # which refuses 0.12.0rc0
cpu.enable()
new_group = dist.new_group


@functools.wraps(new_group)
def over_gloo(*args: Any, **kwargs: Any) -> Any:
    """It asks for NCCL by name."""
    return new_group(*args, **{**kwargs, "backend": None})


dist.new_group = over_gloo
training.enable()
runpy.run_path(sys.argv[0], run_name="__main__")
