"""Megatron-LM's training loop without a GPU: what it needs beyond megatron-core."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from megatron_muon.runtime.patches import Function, Patches

_MEMORY = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
_patches = Patches(by="megatron_muon.cpu")


def enable() -> None:
    """Put the replacements in place, after ``cpu.enable()``; imports megatron.training.

    Twice is once. There is no way back in a process that trains.
    """
    for replace in REPLACEMENTS if not _patches.is_on() else ():
        replace(_patches)


def device(patches: Patches) -> None:
    """One device of Ampere's capability (the first that has bf16) and no memory to
    speak of.

    With 0 devices Megatron silently skips the model-parallel groups
    (initialize.py:319).
    """
    numbers = {"major": 8, "minor": 0, "total_memory": 0, "multi_processor_count": 1}
    properties = SimpleNamespace(name="cpu", **numbers)
    patches.set_all(
        torch.cuda,
        device_count=lambda: 1,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (8, 0),
    )


def memory(patches: Patches) -> None:
    """Statistics of GPU memory, which the log reports (training/utils.py:284): zero."""
    patches.set_all(
        torch.cuda,
        memory_stats=lambda device=None: defaultdict(int),
        empty_cache=lambda: None,
        **dict.fromkeys(_MEMORY, lambda device=None: 0),
    )


def fused_kernels(patches: Patches) -> None:
    """Nothing is compiled for a GPU (initialize.py:204). Since Megatron-LM 0.17 there
    are none.
    """
    if hasattr(
        importlib.import_module("megatron.training.initialize"), "fused_kernels"
    ):
        legacy = importlib.import_module("megatron.legacy.fused_kernels")
        patches.set(legacy, "load", lambda args: None)


def initialize(patches: Patches) -> None:
    """``initialize_megatron`` is told that there may be no GPU, and warms up no fused
    kernels.

    It asserts a GPU unless told (initialize.py:60).
    """

    def without_gpu(original: Function, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    module = "megatron.training.initialize"
    patches.wrap(module, "initialize_megatron", without_gpu, "megatron.")
    patches.wrap(module, "set_jit_fusion_options", lambda *_, **__: None, "megatron.")


REPLACEMENTS = (device, memory, fused_kernels, initialize)
