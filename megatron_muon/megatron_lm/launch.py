"""``torchrun … -m megatron_muon SCRIPT ARGS``: Megatron-LM's scripts with ``--optimizer
muon``.

The checkout stays unchanged. Without a GPU the script runs on the CPU over gloo.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NoReturn

from megatron_muon.console import printable, say, say_once
from megatron_muon.presence import MuonError, require_core, version_parts

USAGE = (
    "usage: torchrun ... -m megatron_muon [--muon-cpu] SCRIPT.py [its arguments, with "
    "--optimizer "
    "muon]\n--muon-cpu runs it on the CPU over gloo, as without it on a node without "
    "GPUs"
)
ON_CPU = "--muon-cpu"  # before the script's path or among its arguments
_WAIT = 20  # seconds in which torchrun ends the other ranks of a node
_CORES = ("numpy", "packaging")  # what megatron.core imports beside torch
_SCRIPTS = (*_CORES, "einops", "psutil", "pydantic", "regex", "six", "triton", "yaml")
_PACKAGES = {"yaml": "pyyaml"}  # the package of a module of another name


class MixedInstallationError(MuonError, RuntimeError):
    """megatron.core and megatron.training come from different places."""


class MissingPackageError(MuonError, ModuleNotFoundError):
    """Megatron-LM, or its script, imports a package that is not installed."""


class DatasetHelperError(MuonError, RuntimeError):
    """Megatron's ``make`` compiles no dataset helper for this Python."""


class LostGpuError(MuonError, RuntimeError):
    """torch sees no GPU where one is expected, and nothing asks for the CPU."""


def main(argv: Sequence[str]) -> None:
    """Run a training script of a Megatron-LM checkout: its path and arguments.

    Raises:
        SystemExit: no script is given, or it is not there; or, as one line on one rank
            of a node, what this installation lacks and how to get it.
        FileNotFoundError: the script's checkout is not there.
        SeamError, LostGpuError: see what is called here.
    """
    if argv and argv[0] == ON_CPU:
        argv = [*argv[1:2], ON_CPU, *argv[2:]]
    if not argv or argv[0] in ("-h", "--help", ON_CPU):
        raise SystemExit(USAGE)
    script = Path(argv[0]).resolve()
    if not script.is_file():
        raise SystemExit(f"no script {argv[0]}\n{USAGE}")
    checkout = checkout_of(script)
    # as `python SCRIPT` does for the script's folder, and for the Megatron that the
    # script imports
    sys.path[:0] = list(dict.fromkeys([str(script.parent), str(checkout)]))
    try:
        check_installation(checkout)
        require_core()
        if ON_CPU in argv:
            hide_gpus()
        sys.argv = [str(script), *argv[1:]]
        _run(script, checkout)
    except (MixedInstallationError, MissingPackageError, DatasetHelperError) as error:
        _end(f"{type(error).__name__}: {error}")


def _end(line: str) -> NoReturn:
    """End with one line, on one rank of each node, since all of a node lack the same.

    torchrun repeats it at the end of its own report, and ends the other ranks: they
    wait for that.
    """
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report is not None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(_WAIT)
        details = {"py_callstack": line, "timestamp": str(int(time.time()))}
        message = {"message": line, "extraInfo": details}
        Path(report).write_text(json.dumps({"message": message}))
    raise SystemExit(line)


def _run(script: Path, checkout: Path) -> None:
    """Run a script with the plugin; MissingPackageError names what to install."""
    try:
        for name in _CORES:  # before torch, which warns where there is no NumPy
            importlib.import_module(name)
        without_gpu()
        training = importlib.import_module("megatron_muon.megatron_lm.install")
        training.install_training()
        module = "megatron.training.initialize"
        training.wrap(module, "initialize_megatron", _initialize_megatron)
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        install = what_to_install(checkout / "megatron" / "core", error)
        if not install:
            raise
        raise MissingPackageError(f"{error}: {install}", name=error.name) from error
    except ImportError as error:
        if error.name != "typing":
            raise
        here = platform.python_version()
        newer = (
            f"this Megatron needs a newer Python than {here} (from core 0.17 on 3.12)"
        )
        raise MissingPackageError(f"{error}: {newer}", name="typing") from error
    except (ZeroDivisionError, TypeError) as error:
        if "args.eval_interval" not in (
            traceback.extract_tb(error.__traceback__)[-1].line or ""
        ):
            raise
        raise ValueError(
            "Megatron divides by --eval-interval: give one, with --eval-iters 0 for no "
            "evaluation"
        ) from error


def _initialize_megatron(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Megatron's, before and after which this installation is checked.

    Megatron compiles the dataset helper on rank 0 when the ranks have met. Here it is
    compiled before, so that a failure ends no other rank in an error of its own.
    """
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & set(sys.argv):
        compile_helper()
    result = original(*args, **kwargs)
    asked = importlib.import_module("megatron.training").get_args()
    saves = asked.save and asked.ckpt_format == "torch_dist"
    if saves and importlib.util.find_spec("psutil") is None:
        text = "no module named 'psutil', without which saves in torch_dist hang"
        raise ModuleNotFoundError(text, name="psutil")
    return result


def compile_helper() -> None:
    """Compile the dataset helper if it may be missing, as Megatron's scripts do.

    Raises:
        DatasetHelperError: this Python has none then; says why.
    """
    datasets = importlib.import_module("megatron.core.datasets.utils")
    folder = Path(str(datasets.__file__)).parent
    fault = helper_fault(folder)
    if not fault and has_helper(folder):
        return
    if fault:
        say(f"[megatron_muon] {fault}")
    try:
        datasets.compile_helpers()
    except SystemExit:
        compiled = False
    else:
        compiled = has_helper(folder)
    if not compiled:
        raise DatasetHelperError(
            fault
            or f"make -C {folder} failed, by which Megatron's scripts compile the "
            "dataset helper at their start: its own lines above say why"
        )


def has_helper(folder: Path) -> bool:
    """Whether ``megatron/core/datasets`` has the compiled module of this Python."""
    return any((folder / f"helpers_cpp{end}").exists() for end in EXTENSION_SUFFIXES)


def helper_fault(folder: Path) -> str:
    """Why Megatron's ``make`` does not compile the dataset helper for this Python.

    Each script of Megatron-LM's runs it at its start, whatever the data. It names the
    file by the ``python3-config`` on PATH. With this Python's suffix it finds a helper
    that is compiled; with another one it compiles, and the run may end there. Empty
    where nothing is wrong.
    """
    own = sysconfig.get_config_var("EXT_SUFFIX")
    program = shutil.which("python3-config")
    found = "there is no python3-config"
    if program is not None:
        suffix = _output(program, "--extension-suffix")
        found = f"{program} has {suffix or 'no suffix'}"
        if suffix == own:
            return _pybind11_fault(folder)
    return (
        "Megatron's scripts compile the dataset helper at their start by the "
        f"python3-config on PATH. This Python's suffix is {own}; {found}. "
        f"{_way_to_python_config()}"
    )


def _pybind11_fault(folder: Path) -> str:
    """Whether a helper that is to be compiled lacks pybind11, which ``python3`` has."""
    program = shutil.which("python3")
    if has_helper(folder) or program is None:
        return ""
    if _output(program, "-m", "pybind11", "--includes"):
        return ""
    return (
        "Megatron's scripts compile the dataset helper at their start with pybind11 of "
        f"the python3 on PATH, which has none; {program} -m pip install pybind11"
    )


def _output(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip()


def _way_to_python_config() -> str:
    """How this Python's ``python3-config`` comes first on PATH."""
    installed = Path(sysconfig.get_config_var("BINDIR"), "python3-config")
    folder = Path(sys.executable).parent  # of a virtual environment, which has none
    if not installed.exists():
        return (
            "Install this Python's development files (python3-dev, python3-devel), "
            "or use a Python that has a python3-config"
        )
    if folder == installed.parent:
        return f"Run: export PATH={folder}:$PATH"
    return f"Run: ln -s {installed} {folder}, and export PATH={folder}:$PATH"


def what_to_install(core: Path, error: ModuleNotFoundError) -> str:
    """The way out of an error of an import: its package, and the others that are not
    here.

    They are those of a folder ``megatron/core``, and of the scripts beside it. Empty
    where the error names no module, or one of Megatron's own.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name.startswith("megatron"):
        return ""
    known = _SCRIPTS if (core.parent / "training").is_dir() else _CORES
    absent = [module for module in known if importlib.util.find_spec(module) is None]
    packages = [_PACKAGES.get(module, module) for module in (name, *absent)]
    names = " ".join(dict.fromkeys(packages))
    return f"Megatron-LM needs it, not megatron_muon; pip install {names}"


def checkout_of(script: Path) -> Path:
    """The folder above the script, or else on the import path, that has
    ``megatron/training``.
    """
    for folder in (*script.parents, *map(Path, sys.path)):
        if (folder / "megatron" / "training").is_dir():
            return folder.resolve()
    raise FileNotFoundError(
        f"{script} is in no Megatron-LM checkout (a folder with megatron/training), "
        "and none is on PYTHONPATH"
    )


def check_installation(checkout: Path) -> None:
    """Raise MixedInstallationError if megatron.core would come from elsewhere.

    Equal versions from different places are refused, too: either may have been edited.
    """
    spec = importlib.util.find_spec("megatron.core")
    where = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if where is not None and checkout.resolve() in where.parents:
        return
    fault = "Python finds no megatron.core"
    way_out = "where it has no megatron/core, get all of it"
    if where is not None:
        other = where.parent
        fault = (
            f"megatron.core would be imported from {other} (core {version_of(other)})"
        )
        way_out = "uninstall that megatron-core"
    raise MixedInstallationError(
        f"megatron.training is in {checkout} (core "
        f"{version_of(checkout / 'megatron' / 'core')}), but {fault}: put the checkout "
        f"first on PYTHONPATH, or {way_out}"
    )


def version_of(core: Path) -> str:
    """The version in the package_info.py of a folder ``megatron/core``, without
    importing it.
    """
    parts = version_parts(core / "package_info.py")
    numbers = (str(parts.get(name, "?")) for name in ("MAJOR", "MINOR", "PATCH"))
    return printable(".".join(numbers))


def hide_gpus() -> None:
    """Hide the GPUs from torch; a RuntimeError where it has already found them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        raise RuntimeError(
            f"{ON_CPU}: torch uses a GPU of this machine already; start the process "
            "with CUDA_VISIBLE_DEVICES= in its environment"
        )


def without_gpu(*, late: bool = False) -> None:
    """Turn on the CPU runtime where there is no GPU, unless one is expected
    (LostGpuError).
    """
    torch = importlib.import_module("torch")
    cpu = importlib.import_module("megatron_muon.cpu")
    if torch.cuda.is_available() or cpu.enabled():
        return
    sign = None if ON_CPU in sys.argv else sign_of_gpu()
    if sign is not None:
        raise LostGpuError(
            f"torch sees no GPU on rank {os.environ.get('RANK', '0')} "
            f"({platform.node()}), but {sign}. Check "
            f"nvidia-smi and CUDA_VISIBLE_DEVICES there, or give {ON_CPU} to run on "
            "the CPU on every rank"
        )
    cpu.enable(late=late)
    importlib.import_module("megatron_muon.cpu.training").enable()
    why = ON_CPU if ON_CPU in sys.argv else "no GPU is here"
    say_once(f"[megatron_muon] {why}: Megatron runs on the CPU over gloo")


def sign_of_gpu() -> str | None:
    """The reason to expect a GPU where torch sees none, or None."""
    torch = importlib.import_module("torch")
    if torch.version.cuda is not None and _has_driver():
        return (
            f"this torch is built for CUDA {torch.version.cuda} and NVIDIA's "
            "driver is installed"
        )
    world = os.environ.get("WORLD_SIZE", "")
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if world.isdecimal() and local.isdecimal() and int(world) > int(local):
        return (
            f"the run has several nodes (WORLD_SIZE={world}, LOCAL_WORLD_SIZE={local})"
        )
    nodes = os.environ.get("SLURM_NNODES") or "1"
    if nodes != "1" and not local and world not in ("", "1"):
        return f"the run has {nodes} nodes (SLURM_NNODES)"
    return None


def _has_driver() -> bool:
    """Whether the kernel has NVIDIA's driver, or its library can be loaded."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
