"""A run's own script builds its model: the parser, the checks and the model are the
script's.

The script runs until it calls ``megatron.training.pretrain``. Then Megatron-LM builds
the chunks of any rank in their DDP, on the meta device and over process groups that do
nothing, until it asks for the optimizer. Packages of kernels have stand-ins; flags that
need a GPU and change no parameter are left out. Nothing is read or written but what the
script itself reads before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch.distributed as dist

import megatron_muon.cpu
from megatron_muon.cpu import options
from megatron_muon.lab.dry_run import stand_ins
from megatron_muon.lab.dry_run.seams import SCRIPT
from megatron_muon.lab.pricing.work import state_bytes
from megatron_muon.mcore.seams.rows import check_rows
from megatron_muon.megatron_lm import install
from megatron_muon.megatron_lm.launch import check_installation, checkout_of
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.flags import MUONS

# Of a run that is not planned: what it writes, how it begins, and the memory of its
# parameters.
_TURNED_OFF = {
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "async_save": False,
    "skip_train": False,
    "lazy_mpu_init": False,
    "use_cpu_initialization": False,
    "init_model_with_meta_device": False,
}
_REMOVED = "left out, since it needs a GPU and changes no parameter"
_IN_FEW_BITS = ("fp8_param_gather", "fp4_param")


class _Stopped(BaseException):
    """The script called pretrain, or Megatron asked for the optimizer; carries the
    arguments.
    """


class ScriptArguments(Namespace):
    """Megatron-LM's arguments of a run, validated, which also build its model."""

    embeddings: dict[str, Any]  # for initialize_model_parallel, chosen by the script
    _setup: dict[str, Any]

    def chunks(self) -> list[Any]:
        """This rank's model chunks in their DDP, built as in the run."""
        from megatron.training import global_vars, training

        global_vars.set_args(self)
        self.rank = dist.get_rank()
        setup = training.setup_model_and_optimizer
        arguments = dict(self._setup)
        if "pg_collection" in inspect.signature(setup).parameters:
            from megatron.core.process_groups_config import ProcessGroupCollection

            arguments["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        stop = {"get_megatron_optimizer": _stop, "get_megatron_muon_optimizer": _stop}
        with replaced(training, **stop), _unheard():
            try:
                setup(**arguments)
            except _Stopped as stopped:
                chunks: list[Any] = stopped.args[0][1]
                return chunks
        raise RuntimeError(
            "the script's model is built without asking for an optimizer"
        )


@functools.cache
def prepare(script: Path) -> None:
    """Import the Megatron-LM of a script, once in a process, before anything of
    Megatron is.
    """
    if not script.is_file():
        raise FileNotFoundError(f"no script {script}")
    checkout = checkout_of(script)
    sys.path[:0] = list(dict.fromkeys([str(script.parent), str(checkout)]))
    check_installation(checkout)
    stand_ins.install()
    with _unheard():
        megatron_muon.cpu.enable(allow_cuda=True)
        from megatron_muon.cpu import training

        training.enable()
        install.install_training()
        check_rows(SCRIPT)


def arguments_of(
    script: Path, words: Sequence[str], world_size: int
) -> tuple[ScriptArguments, MuonConfig, list[str]]:
    """Run a script until it calls ``pretrain``; ``prepare`` comes first.

    Muon and the distributed optimizer are turned on where they are not.

    Returns:
        Its validated arguments; Muon's settings; what there is to say about flags that
        are added or left out.

    Raises:
        ValueError, AssertionError, NotImplementedError: Megatron or the plugin refuses
            the flags.
    """
    words, notes = _with_muon(words)
    configs: list[MuonConfig] = []
    lines: list[str] = []
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    from megatron_muon.mcore.wiring import install as core

    with (
        patch.dict(os.environ, ranks),
        patch.object(sys, "argv", [str(script), *words]),
        replaced(install, _tell=lines.extend, _on_the_cpu=_without_gpu),
        replaced(core, install=configs.append),
        _unheard() as printed,
    ):
        _forget()
        called_with = _called(script, printed)
        args = _initialized(called_with, printed)
    notes += [line for line in lines if line.startswith(_REMOVED)]
    from megatron.training.training import setup_model_and_optimizer

    called_with["model_provider_func"] = called_with.get("model_provider")
    arguments = ScriptArguments(**vars(args))
    arguments._setup = _named(
        called_with, inspect.signature(setup_model_and_optimizer).parameters
    )
    names = ("get_embedding_ranks", "get_position_embedding_ranks")
    arguments.embeddings = _named(called_with, names)
    return arguments, configs[-1], notes


def _named(arguments: dict[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in names}


def _with_muon(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with Muon and the distributed optimizer, and notes on what is added."""
    every = list(words)
    notes: list[str] = []
    line = f" {' '.join(words)} ".replace("=", " ")
    if " --muon-backend upstream " in line:
        raise ValueError(
            "--muon-backend upstream: this plans the plugin's Muon; remove it"
        )
    name = next((name for name in MUONS if f" --optimizer {name} " in line), "muon")
    for flag in (f"--optimizer {name}", "--use-distributed-optimizer"):
        if f" {flag} " not in line:
            every += flag.split()
            notes.append(f"planned with {flag}, which a run with Muon needs")
    return every, notes


def _called(script: Path, printed: io.StringIO) -> dict[str, Any]:
    """The arguments with which the script calls pretrain, by name."""
    import megatron.training as package
    from megatron.training import training

    signature = inspect.signature(training.pretrain)
    with replaced(package, pretrain=_stop), replaced(training, pretrain=_stop):
        try:
            with _refusing(printed):
                runpy.run_path(str(script), run_name="__main__")
        except _Stopped as stopped:
            arguments, options = stopped.args
            return dict(signature.bind(*arguments, **options).arguments)
    raise ValueError(f"{script} ended before it called pretrain of megatron.training")


def _initialized(called_with: dict[str, Any], printed: io.StringIO) -> Namespace:
    """Megatron's arguments, parsed and validated by it with what the script gave to
    pretrain.
    """
    from megatron.training import get_args, initialize

    initialized = initialize.initialize_megatron
    options = _named(called_with, inspect.signature(initialized).parameters)
    with _refusing(printed):
        initialized(**options, skip_mpu_initialization=True)
    args: Namespace = get_args()
    return args


def _without_gpu(args: Namespace) -> list[str]:
    """Turn off options that need a GPU; return a note on those that the run has.

    A run on a CPU replaces more of them. Here nothing is run.
    """
    for name, value in _TURNED_OFF.items():
        if hasattr(args, name):
            setattr(args, name, value)
    _take_state_bytes(args)
    rows = [
        row for row in options.REFUSED if row.needs_gpu(getattr(args, row.dest, None))
    ]
    for row in rows:
        if row.dest in _IN_FEW_BITS:
            raise NotImplementedError(
                f"{row.option}: such weights have grad buffers of their own, which are "
                "not planned yet; remove it: the routing is the same"
            )
        value = getattr(args, row.dest)
        instead = row.instead.split()
        off = False if isinstance(value, bool) else None
        setattr(args, row.dest, instead[1] if instead[0] == row.option else off)
    kept = args.transformer_impl
    options.replace(args)
    args.transformer_impl = kept  # it has a stand-in
    names = ", ".join(row.option for row in rows)
    return [f"{_REMOVED}: {names}"] if rows else []


def _take_state_bytes(args: Namespace) -> None:
    """Turn off what only Transformer Engine's FusedAdam can, and keep what it costs."""
    args.state_bytes = state_bytes(args)
    if args.use_precision_aware_optimizer:
        args.use_precision_aware_optimizer = args.optimizer_cpu_offload = False
        args.grad_reduce_in_bf16 |= args.main_grads_dtype == "bf16"
        for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
            setattr(args, f"{name}_dtype", "fp32")


def _stop(*args: Any, **options: Any) -> NoReturn:
    raise _Stopped(args, options)


def _forget() -> None:
    """Forget the arguments of an earlier script, which Megatron keeps once in a
    process.
    """
    from megatron.core import num_microbatches_calculator, rerun_state_machine
    from megatron.training import global_vars

    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


class _Printed(io.StringIO):
    def fileno(self) -> int:
        return 2  # of stderr: a module of 0.16 hands it to faulthandler


@contextlib.contextmanager
def _unheard() -> Iterator[io.StringIO]:
    """A context that keeps what Megatron prints."""
    printed = _Printed()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


@contextlib.contextmanager
def _refusing(printed: io.StringIO) -> Iterator[None]:
    """Turn the exit of Megatron's parser into an error with its last line."""
    try:
        yield
    except SystemExit as ended:
        lines = printed.getvalue().strip().split("\n")
        raise ValueError(lines[-1].partition(" error: ")[2] or lines[-1]) from ended
