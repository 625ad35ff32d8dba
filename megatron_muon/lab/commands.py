"""The command ``megatron-muon``; each of its commands is a module that is imported when
it runs.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import platform
import sys
import textwrap
from collections.abc import Mapping, Sequence

from megatron_muon.console import printable
from megatron_muon.lab.interrupts import run_command
from megatron_muon.lab.outputs import CommandError
from megatron_muon.presence import MuonError, core_version
from megatron_muon.version import __version__

# By name: a module of the lab with ``main(arguments) -> exit status``, and what it
# does.
BENCHES: Mapping[str, tuple[str, str]] = {
    "step": (
        "bench.step.command",
        "an optimizer step: AdamW, Muon in both layouts, Megatron's own",
    ),
    "newton-schulz": (
        "bench.newton_schulz",
        "speed of the iterations, beside other packages'",
    ),
}
COMMANDS: Mapping[str, tuple[str, str]] = {
    "routes": (
        "routes.command",
        "print each parameter's optimizer, matrices and homes",
    ),
    "plan": (
        "plan.command",
        "predict bytes, work, memory and time of a run's optimizer step",
    ),
    "doctor": ("doctor.command", "check whether Muon would run here, and on what"),
    "accept": ("accept.command", "run a clone's tests on this node's GPUs, and report"),
    "checkpoint": (
        "inspect.command",
        "inspect a checkpoint's contents, and if they are complete",
    ),
    "trace": (
        "trace.command",
        "report where a step's time goes, from torch profiler's traces",
    ),
    "curves": (
        "curves.command",
        "compare the steps that runs need for the same losses",
    ),
    "bench": ("", "measure a step, or Newton-Schulz"),
}
# the latter of [lab]
LIBRARIES = ("torch", "pandas", "numpy", "tensorboard", "matplotlib")
# Commands and flags that went, with what to use in their place.
GONE: Mapping[str, str] = {
    "certify": (
        "plan prices memory, bytes and time; tests/unit/virtual_gpu checks races"
    ),
    "patch": "use `git apply`; patches/README.md of a clone has the two commands",
    "watch": (
        "a run with --muon-log-interval prints its warnings; TensorBoard and "
        "W&B show numbers"
    ),
    "compare": (
        "use examples/evidence/compare.py of a clone; it has no slowed links and no "
        "picture"
    ),
    "scales": (
        "an update's root mean square is the table of docs/switching_and_tuning.md"
    ),
    "trace merge": "https://ui.perfetto.dev opens several ranks' files on one "
    "timeline ("
    "Open multiple trace files)",
    "plan --plot": "--json FILE has all figures of a sweep, for a script of your own",
    "trace --plot": "--json FILE has every figure, for a script of your own",
    "plan --node-size": (
        "give --set gpus_per_node=N, and the run's own --muon-node-ranks N"
    ),
    "trace run": (
        "give the training command Megatron's --profile --use-pytorch-profiler "
        "--tensorboard-dir FOLDER"
    ),
    "accept --folder": "name the folder itself: megatron-muon accept FOLDER",
    (
        "bench newton-schulz --accuracy"
    ): "docs/coefficients.md has each set's errors; in a clone "
    "`cd tests && python -m figures.restart_errors` prints Gram's",
    "bench newton-schulz --find-restarts": "in a clone, "
    "`cd tests && python -m figures.restart_errors --find`",
    "bench speeds": "no flag takes speeds now; on slow links give --muon-homes local "
    "(docs/performance.md)",
    "bench step --plot": "--json FILE has every figure, for a script of your own",
    (
        "bench step --muon-tp-mode"
    ): "a row for each: upstream-blockwise, -duplicated and -distributed",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command by its name and arguments, by default the process's.

    Returns:
        The command's exit status; 1 where it cannot do its work, as without a supported
        core; 2 for wrong arguments; 141 where the reader of its output is gone; 130
        where a user stops it.
    """
    return run_command(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(_versions())
        return 0
    for name, instead in GONE.items():
        if _is_asked_for(name.split(), arguments):
            print(f"megatron-muon {name} is gone: {instead}", file=sys.stderr)
            return 2
    if arguments[:1] == ["bench"]:
        return _named("megatron-muon bench", BENCHES, arguments[1:])
    return _named("megatron-muon", COMMANDS, arguments)


def _versions() -> str:
    """One line for a report of a fault; neither torch nor Megatron is imported."""
    try:
        core = core_version() or "of unknown version"
    except ModuleNotFoundError:
        core = "none"
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    python = platform.python_version()
    return (
        f"megatron-muon {__version__}, megatron-core {core}, torch {torch}, "
        f"Python {python}"
    )


def _is_asked_for(words: Sequence[str], arguments: Sequence[str]) -> bool:
    """Whether a line has the command of ``words``, and their flag if they end with
    one.
    """
    size = sum(not word.startswith("-") for word in words)
    flags = {argument.partition("=")[0] for argument in arguments[size:]}
    return arguments[:size] == words[:size] and flags.issuperset(words[size:])


def _named(
    program: str, commands: Mapping[str, tuple[str, str]], arguments: list[str]
) -> int:
    """Run the one of ``commands`` that the first argument names."""
    usage = _usage(program, commands)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        print(f"{program}: error: no command {name!r}\n{usage}", file=sys.stderr)
        return 2
    gc.set_threshold(10_000)  # a sixth of an import of Megatron goes into collections
    try:
        module = importlib.import_module(f"megatron_muon.lab.{commands[name][0]}")
        return int(module.main(rest))
    except BrokenPipeError:
        raise  # the reader of the output is gone, which is no error of a file
    except (CommandError, MuonError, OSError) as error:
        why = str(error)
    except MemoryError:
        why = "it takes more memory than there is"
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        why = f"it needs {error.name}: pip install {error.name}"
    print(f"{program} {name}: error: {printable(why, kept=chr(10))}", file=sys.stderr)
    return 1


def _usage(program: str, commands: Mapping[str, tuple[str, str]]) -> str:
    usage = f"usage: {program} COMMAND ... (COMMAND --help says more)"
    if commands is COMMANDS:
        usage += (
            ", or --version\n"
            "       python -m megatron_muon SCRIPT.py ...  (a script of Megatron-LM's)"
        )
    width = max(map(len, commands)) + 4
    lines = [usage, ""]
    for name, (_, purpose) in commands.items():
        indented = textwrap.indent(textwrap.fill(purpose, 80 - width), " " * width)
        lines.append(f"  {name:{width - 2}}{indented[width:]}")
    return "\n".join(lines)
