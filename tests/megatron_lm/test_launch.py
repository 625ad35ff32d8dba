"""The launcher before Megatron: ``--muon-cpu``, and GPUs that are lost."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets import utils as datasets
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

import megatron_muon.cpu.training
from megatron_muon.lab.doctor import rows as doctor_rows
from megatron_muon.megatron_lm import launch
from megatron_muon.megatron_lm.launch import (
    DatasetHelperError,
    LostGpuError,
    without_gpu,
)
from support import ROOT, written
from support.processes import python

SCRIPT = {"pretrain_gpt.py": "raise SystemExit('the script was run')\n"}


def script(root: Path, core: str) -> str:
    """That of a folder which the launcher takes for a checkout, whose megatron.core has
    this source.
    """
    number = "MAJOR = 0\nMINOR = 19\nPATCH = 0\n"
    files = {
        "megatron/core/__init__.py": core,
        "megatron/core/package_info.py": number,
        "megatron/training/__init__.py": "",
    }
    return str(written(root, {**files, **SCRIPT}) / "pretrain_gpt.py")


def launched(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "megatron_muon", *words, PYTHONPATH=str(ROOT), **variables)


def test_without_any_core_nothing_is_to_be_uninstalled(tmp_path: Path) -> None:
    # a megatron without a core, so that none of this environment is found
    written(tmp_path / "megatron", {"__init__.py": "", "training/none": ""})
    done = launched(str(written(tmp_path, SCRIPT) / "pretrain_gpt.py"))
    assert done.returncode == 1 and "Python finds no megatron.core" in done.stderr
    assert "uninstall" not in done.stderr


PIP = "pip install"
MISSING = "MissingPackageError: No module named 'yaml': Megatron-LM needs it, not"


@pytest.mark.parametrize(
    "core, said, unsaid",
    [
        (
            "raise ModuleNotFoundError(\"No module named 'yaml'\", name='yaml')",
            (MISSING, f"{PIP} pyyaml"),
            ("Traceback",),
        ),
        (
            "raise ImportError(\"cannot import name 'override'\", name='typing')",
            ("this Megatron needs a newer Python than 3.",),
            (),
        ),
        # a module of Megatron's own
        ("import megatron.gone", (), ("MissingPackageError", PIP)),
    ],
    ids=["package", "Python", "Megatron's"],
)
def test_what_an_import_of_megatron_lacks_is_named(
    core: str, said: tuple[str, ...], unsaid: tuple[str, ...], tmp_path: Path
) -> None:
    text = launched(script(tmp_path, core)).stderr
    assert all(each in text for each in said)
    assert not any(each in text for each in unsaid)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchruns_report_ends_with_the_line_of_one_rank(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait until torchrun ends them."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit, match="the line"):
        launch._end("the line")
    assert len(waited) == int(rank)
    failure = ProcessFailure(int(rank), 1, 1, str(tmp_path / "error.json"))
    group = ChildFailedError("run", {int(rank): failure})
    assert "traceback : the line\n" in str(group)


# --- the dataset helper ---------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "another Python"])
@pytest.mark.parametrize("makes", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_a_helper_that_this_python_lacks_ends_the_run_before_the_ranks_meet(
    fault: str, makes: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's make succeeds or not; a helper was compiled before or not."""
    made: list[bool] = []

    def compile_helpers() -> None:
        made.append(makes)
        if not makes:
            raise SystemExit(1)

    monkeypatch.setattr(datasets, "compile_helpers", compile_helpers)
    monkeypatch.setattr(launch, "helper_fault", lambda folder: fault)
    monkeypatch.setattr(
        launch, "has_helper", lambda folder: there or (made == [True] and not fault)
    )
    is_asked = bool(fault) or not there
    ends = is_asked and not (makes and (there or not fault))
    why = pytest.raises(DatasetHelperError, match=fault or "make -C ")
    with why if ends else contextlib.nullcontext():
        launch.compile_helper()
    assert made == [makes] * is_asked


@pytest.mark.parametrize("shown", ["", "-I/somewhere"])
def test_pybind11_is_asked_for_where_nothing_is_compiled(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sysconfig.get_config_var("EXT_SUFFIX")
    for name, echoed in (("python3-config", own), ("python3", f"'{shown}'")):
        written(tmp_path, {name: f"#!/bin/sh\necho {echoed}\n"})
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lacks = launch.helper_fault(tmp_path)
    assert lacks.endswith("python3 -m pip install pybind11") == (not shown)
    assert launch.helper_fault(Path(datasets.__file__).parent) == ""


@pytest.mark.parametrize("format_", ["torch_dist", "torch"])
def test_a_run_that_saves_needs_psutil(
    format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(save="folder", ckpt_format=format_)
    training = SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setenv("RANK", "1")
    assert launch._initialize_megatron(lambda: "done") == "done"
    monkeypatch.setitem(sys.modules, "psutil", None)
    hangs = pytest.raises(ModuleNotFoundError, match="'psutil', without which saves")
    with hangs if format_ == "torch_dist" else contextlib.nullcontext():
        launch._initialize_megatron(lambda: "done")


# --- the CPU --------------------------------------------------------------------------

SAYS_GPUS = (
    "import os; raise SystemExit('GPUs: ' + os.environ.get('CUDA_VISIBLE_DEVICES', "
    "'all'))"
)


@pytest.mark.parametrize("first", [True, False])
def test_muon_cpu_hides_the_gpus_before_or_behind_the_script(
    first: bool, tmp_path: Path
) -> None:
    own = script(tmp_path, SAYS_GPUS)
    words = ("--muon-cpu", own) if first else (own, "--muon-cpu")
    visible = {"CUDA_VISIBLE_DEVICES": "0"}
    assert launched(*words, **visible).stderr.strip() == "GPUs:"
    assert launched(own, **visible).stderr.strip() == "GPUs: 0"


def test_muon_cpu_without_a_script_is_the_usage() -> None:
    done = launched("--muon-cpu")
    assert done.returncode == 1 and done.stderr.startswith("usage: torchrun")


def test_muon_cpu_is_an_error_where_a_gpu_is_in_use() -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "from megatron_muon.megatron_lm.launch import hide_gpus\n"
        "hide_gpus()"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert "--muon-cpu: torch uses a GPU of this machine already" in done.stderr


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A rank without a GPU whose torch is built for CUDA, beside NVIDIA's driver."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(launch, "_has_driver", lambda: True)
    monkeypatch.setattr(megatron_muon.cpu, "enabled", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def turned_on(patch: pytest.MonkeyPatch) -> list[str]:
    """What ``without_gpu`` turns on."""
    calls: list[str] = []
    patch.setattr(megatron_muon.cpu, "enable", lambda late: calls.append("core"))
    patch.setattr(
        megatron_muon.cpu.training, "enable", lambda: calls.append("training")
    )
    without_gpu()
    return calls


@pytest.mark.parametrize("rank", ["0", "5"])
def test_a_rank_that_lost_its_gpu_is_refused(
    rank: str, lost: pytest.MonkeyPatch
) -> None:
    lost.setenv("RANK", rank)
    with pytest.raises(LostGpuError) as caught:
        turned_on(lost)
    assert f"no GPU on rank {rank} (" in str(caught.value)
    assert "built for CUDA 12.8 and NVIDIA's driver is installed" in str(caught.value)
    assert "or give --muon-cpu" in str(caught.value)
    fault = doctor_rows._device(torch).fault
    assert "built for CUDA 12.8" in fault and "--muon-cpu" in fault


@pytest.mark.parametrize(
    "variables, said",
    [
        ("WORLD_SIZE=16 LOCAL_WORLD_SIZE=8", "WORLD_SIZE=16, LOCAL_WORLD_SIZE=8"),
        ("WORLD_SIZE=16 SLURM_NNODES=2", "2 nodes (SLURM_NNODES)"),
        ("WORLD_SIZE=8 LOCAL_WORLD_SIZE=8 SLURM_NNODES=2", ""),
        ("WORLD_SIZE=1 SLURM_NNODES=2", ""),
        ("SLURM_NNODES=2", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("lacks", ["cuda", "driver"])
def test_several_nodes_are_refused_and_one_without_cuda_or_a_driver_takes_the_cpu(
    variables: str, said: str, lacks: str, lost: pytest.MonkeyPatch
) -> None:
    if lacks == "cuda":
        lost.setattr(torch.version, "cuda", None)
    else:
        lost.setattr(launch, "_has_driver", lambda: False)
    for variable in variables.split():
        lost.setenv(*variable.split("="))
    if said:
        with pytest.raises(LostGpuError, match=re.escape(said)):
            turned_on(lost)
    else:
        assert turned_on(lost) == ["core", "training"]


def test_muon_cpu_takes_the_cpu_wherever_a_gpu_was_expected(
    lost: pytest.MonkeyPatch,
) -> None:
    lost.setattr(sys, "argv", ["pretrain_gpt.py", "--muon-cpu"])
    lost.setenv("WORLD_SIZE", "16")
    lost.setenv("LOCAL_WORLD_SIZE", "8")
    assert turned_on(lost) == ["core", "training"]


def test_no_script_runs_on_a_rank_of_several_nodes_without_a_gpu(
    tmp_path: Path,
) -> None:
    own = script(tmp_path, "")
    done = launched(own, RANK="11", WORLD_SIZE="16", LOCAL_WORLD_SIZE="8")
    assert done.returncode == 1 and "the script was run" not in done.stderr
    assert "LostGpuError: torch sees no GPU on rank 11 (" in done.stderr
    assert "needs Python" not in done.stderr
