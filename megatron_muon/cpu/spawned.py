"""Torch's part of the CPU runtime in processes that a run spawns, which start without
it.
"""

import importlib
from typing import Any

from megatron_muon.cpu import training
from megatron_muon.runtime.patches import Function, Patches

_patches = Patches(by="megatron_muon.cpu")  # of a spawned process


class _Torch:
    """Turns torch's part on where it is unpickled: a process by spawn or forkserver is
    pickled.
    """

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return turn_on, ()


def turn_on() -> None:
    """Replace what a CPU cannot run in torch, and have one device.

    Megatron is not imported for it, which takes seconds: a process that holds a queue,
    as Megatron's writers start, needs none of it.
    """
    table = importlib.import_module("megatron_muon.cpu.table")
    for replace in (*table.BEFORE_MEGATRON, training.device, training.memory):
        replace(_patches)


def turn_off() -> None:
    """Give way to the whole runtime."""
    _patches.undo()


def processes(patches: Patches) -> None:
    """A process that is spawned starts with torch's part of the CPU runtime; a fork has
    all of it.

    Megatron's persistent writer of checkpoints divides by the number of GPUs
    (async_utils.py:488), and the run waits for it forever where it fails.
    """

    def with_torch(start: Function, process: Any) -> None:
        process.megatron_muon_cpu = _Torch()
        start(process)

    patches.wrap("multiprocessing.process", "BaseProcess.start", with_torch)
