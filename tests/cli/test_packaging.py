"""The sdist and the wheel, built offline from a copy of this tree; the version; the
core.
"""

from __future__ import annotations

import email
import email.message
import os
import platform
import re
import shutil
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import megatron_muon
from megatron_muon.lab.commands import GONE
from megatron_muon.presence import core_version
from support import ROOT
from support.processes import succeeded

VERSION = megatron_muon.__version__
# by tests and builds, in a working tree
MADE = "__pycache__ *.egg-info .*_cache .venv* .git .hypothesis build dist out".split()


def files(folder: Path) -> set[str]:
    """Paths of all files, relative to the folder."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def done(*words: str, cwd: Path = ROOT, **variables: object) -> str:
    """What ``python WORDS`` prints; the test fails where it fails."""
    env = {**os.environ, **{key: str(value) for key, value in variables.items()}}
    return succeeded(sys.executable, *words, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the working tree, so that a build leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree") / "clone"
    return Path(shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*MADE)))


@pytest.fixture(scope="module")
def source(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    build = f"import setuptools.build_meta as build; build.build_sdist({str(folder)!r})"
    done("-c", build, cwd=tree)
    (archive,) = folder.iterdir()
    assert archive.name == f"megatron_muon-{VERSION}.tar.gz"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / f"megatron_muon-{VERSION}"


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the sdist as pip does, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = "-m pip wheel --quiet --no-index --no-deps --no-build-isolation".split()
    done(*pip, "--wheel-dir", str(folder), ".", cwd=source)
    (archive,) = folder.iterdir()
    return zipfile.ZipFile(archive)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    text = wheel.read(f"megatron_muon-{VERSION}.dist-info/METADATA").decode()
    return email.message_from_string(text)


def test_the_sdist_has_tests_examples_and_patches_whole(
    tree: Path, source: Path
) -> None:
    for folder in ("tests", "examples", "patches", "megatron_muon"):
        assert files(tree / folder) - files(source / folder) == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= files(source)


def test_the_sdists_tests_run(source: Path) -> None:
    """Two that read the package, the patches and the examples."""
    words = "-m pytest -q -p no:cacheprovider".split()
    words += ["tests/cli/test_patch.py", "tests/megatron_lm/test_examples.py"]
    quick = "goes_in or folder_is_complete"
    assert " passed" in done(*words, "-k", quick, cwd=source, PYTHONPATH=source)
    where = "import megatron_muon; print(megatron_muon.__file__)"
    assert str(source) in done("-c", where, cwd=source, PYTHONPATH=source)


def test_the_wheel_has_the_patches_and_the_mark_of_types_and_no_tests(
    wheel: zipfile.ZipFile,
) -> None:
    names = set(wheel.namelist())
    patches = {f"megatron_muon/patches/{name}" for name in files(ROOT / "patches")}
    assert patches | {"megatron_muon/py.typed"} <= names
    modules = (ROOT / "megatron_muon").rglob("*.py")
    assert {str(path.relative_to(ROOT)) for path in modules} <= names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"megatron_muon", f"megatron_muon-{VERSION}.dist-info"}
    scripts = wheel.read(f"megatron_muon-{VERSION}.dist-info/entry_points.txt").decode()
    assert "megatron-muon = megatron_muon.__main__:main" in scripts


def test_pip_brings_a_megatron_core_only_where_it_is_asked_for(
    metadata: email.message.Message,
) -> None:
    wanted = [line.replace(" ", "") for line in metadata.get_all("Requires-Dist", [])]
    assert [line for line in wanted if "extra==" not in line] == ["torch>=2.4"]
    (core,) = (line for line in wanted if line.startswith("megatron-core"))
    assert core.endswith("extra=='core'") or core.endswith('extra=="core"')
    assert "core" in metadata.get_all("Provides-Extra", [])
    for folder in ("tests", "examples/quickstart"):
        requirements = f"{folder}/requirements.txt"
        assert "\nmegatron-core==" in (ROOT / requirements).read_text()


def test_every_extra_stands_in_usage_and_te_brings_its_library(
    metadata: email.message.Message,
) -> None:
    usage = (ROOT / "docs" / "usage.md").read_text()
    (extras,) = re.findall(r"^The extras are .*?\n\n", usage, re.MULTILINE | re.DOTALL)
    for extra in metadata.get_all("Provides-Extra", []):
        assert f"`{extra}`" in extras
    (engine,) = (
        line for line in metadata.get_all("Requires-Dist", []) if "transformer" in line
    )
    (chosen,) = re.findall(r"\[(.*)\]", engine)
    assert set(re.split(r"[\s,]+", chosen.replace("_", "-"))) == {
        "pytorch",
        "core-cu13",
    }


def test_the_version_stands_in_one_place() -> None:
    sources = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    sources += (ROOT / "megatron_muon").rglob("*.py")
    has = [path for path in sources if f'"{VERSION}"' in path.read_text()]
    assert has == [ROOT / "megatron_muon" / "version.py"]


@pytest.mark.parametrize("module", ["megatron_muon", "megatron_muon.__main__"])
def test_the_launcher_and_the_command_say_their_version(module: str) -> None:
    """One line for a report of a fault; torch is not imported for it."""
    said = done("-m", module, "--version", PYTHONPATH=ROOT)
    names = {"megatron-muon": VERSION, "megatron-core": core_version()}
    names |= {"torch": version("torch"), "Python": platform.python_version()}
    assert said == ", ".join(f"{name} {text}" for name, text in names.items()) + "\n"


WITHOUT_CORE = """
import sys
sys.modules["megatron"] = None  # as where none is installed
import megatron_muon
from megatron_muon.lab.commands import main

for call in (
    megatron_muon.install,
    megatron_muon.uninstall,
    lambda: megatron_muon.meter(None),
    lambda: megatron_muon.reading_adamw(None, "fresh"),
    lambda: megatron_muon.reading_muon(None, "x"),
    lambda: megatron_muon.reading_megatron_muon(None, "x"),
    lambda: megatron_muon.cpu.enable(allow_cuda=True),
):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
sys.stderr = sys.stdout
for command in (["routes", "--num-layers", "2"], ["bench", "step", "--dp", "2"]):
    print(main(command))
print(main(["patch"]))
"""


def test_every_entry_says_how_to_get_a_megatron_core() -> None:
    lines = done("-c", WITHOUT_CORE, PYTHONPATH=ROOT).splitlines()
    says = (
        "there is no megatron.core: pip install megatron-core, or put a Megatron-LM "
        "checkout"
    )
    assert lines[:7] == [f"{says} on PYTHONPATH"] * 7
    assert lines[7:11] == [
        f"megatron-muon routes: error: {says} on PYTHONPATH",
        "1",
        f"megatron-muon bench step: error: {says} on PYTHONPATH",
        "1",
    ]
    assert lines[-2:] == ["megatron-muon patch is gone: " + GONE["patch"], "2"]
