"""The CPU runtime in processes that a run starts anew, which have nothing of what it
replaced.
"""

import functools
import importlib
import sys
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_muon.cpu import training
from megatron_muon.runtime.patches import Patches


class _Runtime:
    """Turns the runtime on where it is unpickled: a process by spawn or forkserver is
    pickled.
    """

    def __reduce__(self) -> tuple[Any, tuple[bool]]:
        return turn_on, (training.enabled(),)


def turn_on(of_training: bool) -> None:
    """As it is in the process that starts this one; also where this one has imported
    Megatron.
    """
    late = "megatron.core" in sys.modules
    importlib.import_module("megatron_muon.cpu").enable(allow_cuda=True, late=late)
    if of_training:
        training.enable()
    else:
        # megatron-core's writers ask for it without its training loop
        training.device(Patches())


def processes(patches: Patches) -> None:
    """A process that is spawned starts with the CPU runtime; a fork has it.

    Megatron's persistent writer of checkpoints divides by the number of GPUs
    (async_utils.py:488), and the run waits for it forever where it fails.
    """
    start = BaseProcess.start

    @functools.wraps(start)
    def starts(self: Any) -> None:
        self.megatron_muon_cpu = _Runtime()
        start(self)

    patches.set(BaseProcess, "start", starts)
