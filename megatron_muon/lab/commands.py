"""The command ``megatron-muon``; each of its commands is a module that is imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from megatron_muon.lab.dispatch import Commands, dispatch
from megatron_muon.lab.interrupts import run_command
from megatron_muon.presence import CoreNotFoundError, SeamError
from megatron_muon.version import __version__

COMMANDS: Commands = {
    "routes": (
        "megatron_muon.lab.routes.command",
        "which parameters are Muon's, in what matrices, and where each is orthogonalized",
    ),
    "plan": (
        "megatron_muon.lab.plan.command",
        "what Muon costs in a run before it starts: bytes, work, memory and time of a step",
    ),
    "doctor": (
        "megatron_muon.lab.doctor.command",
        "whether Muon would run here, on what, and why not",
    ),
    "accept": (
        "megatron_muon.lab.accept.command",
        "the clone's tests on a node with GPUs, in 15 minutes, with a report for an issue",
    ),
    "checkpoint": (
        "megatron_muon.lab.inspect.command",
        "inspect: a checkpoint's contents, and whether they are complete",
    ),
    "trace": (
        "megatron_muon.lab.trace.command",
        "where the time of a step goes, from torch profiler's traces of any run",
    ),
    "curves": (
        "megatron_muon.lab.curves.command",
        "the steps that runs need for the same losses, from logs of any kind",
    ),
    "bench": (
        "megatron_muon.lab.bench.command",
        "measure an optimizer step beside AdamW's, Newton-Schulz, the speed of a rank and its link",
    ),
}


LIBRARIES = ("pandas", "numpy", "rich", "tensorboard", "matplotlib")  # of the extra [lab]
# Commands and flags that went, with what to use in their place.
GONE: Mapping[str, str] = {
    "certify": "plan prices memory, bytes and time; tests/unit/virtual_gpu checks races",
    "patch": "use `git apply`; patches/README.md of a clone has the two lines",
    "watch": "a run with --muon-log-interval prints its warnings; TensorBoard and W&B show numbers",
    "compare": "use examples/evidence/compare.py of a clone; it has no slowed links and no picture",
    "scales": "an update's root mean square is the table of docs/switching_and_tuning.md",
    "plan --plot": "--json FILE has all figures of a sweep, for a script of your own",
    "plan --node-size": "give --set gpus_per_node=N, and the run's own --muon-node-ranks N",
    "trace run": "give the training command --muon-trace-steps FIRST:LAST --muon-trace-dir FOLDER",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the command's name and its own arguments; None for the arguments of the process.

    Returns:
        The exit status: the command's own; 1 where it needs a megatron.core and there is none, or
        one that is not supported; 2 where the arguments are wrong; 141 where the reader of its
        output is gone; 130 where a user stops the command.
    """
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"megatron-muon {__version__}")
        return 0
    command, *rest = arguments or [""]
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    for name in (command, *(f"{command} {word}" for word in (*rest[:1], *flags))):
        if name in GONE:
            print(f"megatron-muon {name} is gone: {GONE[name]}", file=sys.stderr)
            return 2
    try:
        return dispatch("megatron-muon", COMMANDS, arguments, ends=", or --version")
    except (CoreNotFoundError, SeamError) as error:
        print(f"megatron-muon {arguments[0]}: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        say = f"it needs {error.name}: pip install {error.name}"
        print(f"megatron-muon {arguments[0]}: error: {say}", file=sys.stderr)
        return 1
