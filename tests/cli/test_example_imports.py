"""The examples run in the environment that their documents install."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.processes import environment, succeeded

tomllib = pytest.importorskip(
    "tomllib", reason="the standard library has it from Python 3.11 on"
)
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "tutorial" / "one_step.ipynb"
# Scripts, the extras that their document installs, and that document's words about it.
INSTALLED = {
    "minimal.py": ("core", ROOT / "README.md", 'pip install ".[core]"'),
    "tutorial/one_step.py": ("core", NOTEBOOK, "../..[core]"),
    "quickstart/*.py": (
        "core examples",
        EXAMPLES / "quickstart" / "run.sh",
        "requirements.txt",
    ),
    "evidence/*.py": (
        "core examples",
        EXAMPLES / "evidence" / "README.md",
        ". .venv/bin/activate",
    ),
}
OTHERS = {"evidence/policy_gradient.py"}  # in an environment with requirements-rl.txt
SCRIPTS = [
    (script.relative_to(EXAMPLES).as_posix(), pattern)
    for pattern in INSTALLED
    for script in sorted(EXAMPLES.glob(pattern))
    if script.relative_to(EXAMPLES).as_posix() not in OTHERS
]
# of the package megatron-core, and what it installs
OF_CORE = {"megatron-core": {"megatron", "numpy", "packaging"}}


def provided(extras: str) -> set[str]:
    """The top-level modules that ``pip install ".[EXTRAS]"`` brings, torch's aside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"megatron_muon", "torch", *sys.stdlib_module_names}
    for extra in extras.split():
        for requirement in project["optional-dependencies"][extra]:
            package = re.split(r"[<>=\[]", requirement)[0]
            names |= OF_CORE.get(package, {package})
    return names


def imports(file: Path, *, everywhere: bool) -> Iterator[str]:
    """The dotted names that a file imports as it is loaded, or in its functions, too."""
    statements: list[ast.AST] = list(ast.parse(file.read_text()).body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif everywhere or not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try
        ):
            statements += ast.iter_child_nodes(node)


def found(name: str, beside: Path) -> Path | None:
    """The file of the clone that has a module, seen from a script's folder."""
    for folder in (beside, EXAMPLES / "quickstart", ROOT):
        path = folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def foreign(script: Path) -> set[str]:
    """The top-level modules of others that a run of a script imports: in its own
    functions, too, and of what it loads only while that is loaded.
    """
    names: set[str] = set()
    seen: set[Path] = set()
    waiting = [script]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imports(file, everywhere=file == script):
            local = found(name, script.parent)
            if local is not None:
                waiting.append(local)
            elif found(name.rpartition(".")[0] or "-", script.parent) is None:
                names.add(name.partition(".")[0])
    return names


@pytest.mark.parametrize("script, pattern", SCRIPTS)
def test_an_example_imports_what_its_document_installs(
    script: str, pattern: str
) -> None:
    extras, document, words = INSTALLED[pattern]
    assert words in document.read_text()
    assert foreign(EXAMPLES / script) - provided(extras) == set()


def test_the_quickstarts_pins_are_those_of_its_extras() -> None:
    pins = (EXAMPLES / "quickstart" / "requirements.txt").read_text()
    packages = set(re.findall(r"^([\w-]+)==", pins, re.MULTILINE))
    modules = set[str]().union(*(OF_CORE.get(name, {name}) for name in packages))
    assert provided("core examples") - set(sys.stdlib_module_names) - modules == {
        "megatron_muon"
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_minimal_and_the_notebook_run_with_core_alone(tmp_path: Path) -> None:
    """In a new environment, in which nothing else is installed."""

    def done(*command: object, cwd: Path = tmp_path) -> str:
        return succeeded(*command, cwd=cwd, env=env)

    env = environment()
    env.pop("PYTHONPATH", None)
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info")
    clone = Path(shutil.copytree(ROOT, tmp_path / "clone", ignore=unwanted))
    done(sys.executable, "-m", "venv", "new")
    new = tmp_path / "new" / "bin" / "python"
    pins = "--quiet", "--constraint", ROOT / "tests" / "requirements.txt"
    done(new, "-m", "pip", "install", *pins, f"{clone}[core]")
    assert "loss" in done(new, clone / "examples" / "minimal.py")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]
    (clone / "examples" / "tutorial" / "cells.py").write_text("\n".join(code))
    said = done(new, "cells.py", cwd=clone / "examples" / "tutorial")
    assert "all weights of all ranks are the same: True" in said
