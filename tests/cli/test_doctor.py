"""``megatron-muon doctor``: of this environment, of a broken one, and of a checkout."""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

import megatron.core
import pytest
import torch

from megatron_muon.lab.doctor.rows import helper_suffix
from support import PYTHON311, written
from support.megatron_lm.scripts import CHECKOUT, needs_checkout
from support.processes import python

# stands before the doctor's own code, in the same process: what another machine would
# have
NO_MEGATRON = "import sys; sys.modules['megatron'] = None"
STRANGE = (
    "import sys, megatron_muon.mcore.seams.rows as h, dataclasses; at = "
    "'megatron.core.optimizer'; row = next(row for row in h.CORE if row.module == at); "
    "h.CORE = (*h.CORE, dataclasses.replace(row, name='gone', since=(0, 0), until=(9, "
    "9)))"
)
HIDDEN = (
    "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if "
    "n == '{}' else f(n, *a)"
)


def doctor(
    *arguments: str, before: str = "pass", path: tuple[Path, ...] = ()
) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nimport sys\nfrom megatron_muon.lab import commands\n"
    code += "sys.exit(commands.main(sys.argv[1:]))"
    done = python("-c", code, "doctor", *arguments, path=path)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def rows(text: str) -> dict[str, str]:
    """Lines of two columns, which are two spaces apart or more."""
    table, _, verdict = text.partition("\n\n")
    cells = dict(line.split("  ", 1) for line in table.splitlines())
    return {name: value.strip() for name, value in cells.items()} | {
        "verdict": verdict.strip()
    }


@pytest.fixture(scope="module")
def here() -> subprocess.CompletedProcess[str]:
    """What it says of this environment as it is."""
    return doctor()


def test_the_installed_megatron_core(here: subprocess.CompletedProcess[str]) -> None:
    done = here
    assert done.returncode == 0, done.stdout + done.stderr
    report = rows(done.stdout)
    assert report["verdict"] == "Muon would run."
    assert report["torch"] == torch.__version__
    assert report["megatron-core"].startswith(f"{megatron.core.__version__} (")
    assert report["gradient norm"].startswith("Megatron's counts")
    assert report["dataset helper"] == "compiled"  # in the wheel
    assert "fp4_param" in report["refused options"]
    assert "optimizer_cpu_offload" not in report["refused options"]
    assert "use_distributed_optimizer" not in report["refused options"]
    assert "qk_clip" not in report["refused options"]
    have, _, of = report["hooks"].partition(" of ")
    assert have == of and int(of) > 5
    if not torch.cuda.is_available():
        assert "the CPU runtime would be on" in report["device"]
        assert report["adam"] == "megatron_muon.cpu.fused_adam.FusedAdam"


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (
            NO_MEGATRON,
            "there is no megatron.core: pip install megatron-core, or put a "
            "Megatron-LM",
        ),
        (STRANGE, "has no megatron.core.optimizer.gone"),
    ],
    ids=["no megatron", "missing hook"],
)
def test_where_muon_would_not_run(before: str, why: str, tmp_path: Path) -> None:
    """A missing hook is named in its row, too."""
    done = doctor("--json", str(tmp_path / "x.json"), before=before)
    said = json.loads((tmp_path / "x.json").read_text())
    assert (done.returncode, said["runs"], len(said["faults"])) == (1, False, 1)
    assert why in said["faults"][0]
    gone = "not megatron.core.optimizer.gone" in said.get("hooks", "")
    assert gone == (before == STRANGE)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("raise ImportError('no wheel')", "cannot be imported: ImportError: no wheel"),
        ("import not_here.part", "not megatron_muon; pip install not_here numpy"),
        ("raise ModuleNotFoundError('no', name='yaml')", "pip install pyyaml numpy"),
    ],
)
def test_a_core_that_cannot_be_imported(line: str, why: str, tmp_path: Path) -> None:
    """All packages that are missing are named at once: here numpy is hidden, too."""
    core = written(tmp_path, {"megatron/core/__init__.py": f"{line}\n"})
    done = doctor(before=HIDDEN.format("numpy"), path=(core,))
    assert done.returncode == 1 and why in rows(done.stdout)["verdict"]


def test_a_core_that_needs_a_newer_python(tmp_path: Path) -> None:
    files = {
        "megatron/core/__init__.py": "from typing import nothing_of_this_name\n",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 0\n",
        "pyproject.toml": 'requires-python = ">=3.99"\n',
    }
    written(tmp_path, files)
    verdict = rows(doctor(path=(tmp_path,)).stdout)["verdict"]
    assert verdict.startswith(
        "Muon would not run: megatron-core 0.19.0 needs Python >=3.99 ("
    )
    assert "cannot import name 'nothing_of_this_name' from 'typing'" in verdict


def test_an_escape_in_a_checkouts_version_is_printed_as_text(tmp_path: Path) -> None:
    numbers = "MAJOR = 0\nMINOR = 16\nPATCH = '\\x1b[31m1'\n"
    files = {
        "megatron/core/__init__.py": "raise ImportError('\\x1b[32mgreen')\n",
        "megatron/core/package_info.py": numbers,
        "megatron/training/__init__.py": "",
    }
    done = doctor(str(written(tmp_path, files)))
    assert "\x1b" not in done.stdout + done.stderr
    assert rows(done.stdout)["megatron-lm"].startswith(r"core 0.16.\x1b[31m1 (")
    assert r"ImportError: \x1b[32mgreen" in rows(done.stdout)["verdict"]


def test_a_cache_of_torchs_compiler_that_cannot_be_written_is_named() -> None:
    """Every row before it is there; torch makes the folder where torch._dynamo is
    imported.
    """
    before = "import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/dev/null/cache'"
    before += "; import torch; torch.cuda.is_available = lambda: False"
    done = doctor(before=before)
    report = rows(done.stdout)
    assert done.returncode == 1 and report["torch"] == torch.__version__
    assert report["hooks"]
    said = " ".join(report["verdict"].split())
    assert "torch._dynamo cannot be imported: NotADirectoryError" in said
    assert (
        "'/dev/null/cache'" in said
        and "set TORCHINDUCTOR_CACHE_DIR to a folder" in said
    )


def test_a_mixed_installation_names_both(tmp_path: Path) -> None:
    """The checkout's megatron.core is no package, so that the installed one would be
    imported.
    """
    number = "MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ''\n"
    files = {
        "megatron/training/__init__.py": "",
        "megatron/core/package_info.py": number,
    }
    done = doctor(str(written(tmp_path, files)))
    assert done.returncode == 1
    verdict = rows(done.stdout)["verdict"]
    assert (
        str(tmp_path) in verdict and str(Path(megatron.core.__file__).parent) in verdict
    )


@pytest.mark.parametrize("suffix", [".cpython-27.so", None])
def test_a_python_config_of_another_python_is_named(
    suffix: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none at all; Megatron's make takes the file's suffix from it."""
    program = tmp_path / "python3-config"
    monkeypatch.setenv("PATH", str(tmp_path))
    if suffix is not None:
        program.write_text(f"#!/bin/sh\necho {suffix}\n")
        program.chmod(0o755)
    own = sysconfig.get_config_var("EXT_SUFFIX")
    found = (
        "there is no python3-config" if suffix is None else f"{program} has {suffix}"
    )
    written(tmp_path, {f"helpers_cpp{own}": ""})
    fault = helper_suffix(tmp_path).fault
    assert f"This Python's suffix is {own}; {found}. " in fault
    assert "export PATH=" in fault or "development files" in fault
    program.write_text(f"#!/bin/sh\necho {own}\n")
    program.chmod(0o755)
    assert helper_suffix(tmp_path).fault == ""


@needs_checkout
def test_a_checkout() -> None:
    done = doctor(str(CHECKOUT), path=(PYTHON311,))
    assert done.returncode == 0, done.stdout + done.stderr
    report = rows(done.stdout)
    assert report["megatron-lm"].endswith(f"({CHECKOUT.resolve()})")
    assert str(CHECKOUT.resolve()) in report["megatron-core"]
    assert report["patch"].startswith("is not in: ")
    assert report["training hooks"] == "all"
    assert report["python3-config"].endswith("python3-config")
    assert "fp4_param" in report["refused options"]
    assert "Distributed Muon takes the launcher or" in report["plain command"]
