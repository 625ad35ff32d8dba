"""The process of a check: ``python -m megatron_muon.lab.accept.child RUN SETTINGS FILE BUILDS``.

It writes its parts to FILE. With BUILDS 1 it imports Megatron under the CPU runtime, also where
there are GPUs, which are its ranks'. It leads a process group of its own, and ends with the process
that started it, which holds the other end of its standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_muon.files.durable import write_text
from megatron_muon.lab.accept.outcome import Finding, parts_as_json
from megatron_muon.lab.accept.settings import Settings, from_json

Run = Callable[[Settings], Sequence[Finding]]


def main(argv: Sequence[str]) -> int:
    """Run the check that ``argv`` names; 1 where it raised an error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run, settings, file, builds = argv
    try:
        if builds == "1":
            _imports_megatron_without_gpu()
        parts = list(function_of(run)(from_json(settings)))
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        parts = [Finding("no error", "FAILED", f"{type(error).__name__}: {text}")]
        write_text(Path(file), json.dumps(parts_as_json(parts)))
        return 1
    write_text(Path(file), json.dumps(parts_as_json(parts)))
    return 0


def function_of(name: str) -> Run:
    """The function of ``module:function``."""
    module, _, function = name.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def _imports_megatron_without_gpu() -> None:
    import megatron_muon

    if not megatron_muon.cpu.enabled():
        megatron_muon.cpu.enable(allow_cuda=True)


def _end_with_parent() -> None:
    """Kill this process's group, its ranks included, once the parent is gone."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a library must not keep it, as NCCL's can after an error
