"""Each symbol and attribute of the table, gone or renamed, is named before anything
trains.

Each row is renamed in the real core of this process, which is put back then; some in
the source of a copy that a process of its own installs into. `bash tests/run.sh` does
so with every core of tests/cores.txt, and with the scripts of a Megatron-LM checkout
where MEGATRON_LM_PATH names one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import EnumMeta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer
import pytest

import megatron_muon
from megatron_muon.lab.bench import seams as bench
from megatron_muon.lab.doctor import core_seams, cpu_seams
from megatron_muon.lab.dry_run import seams as dry_run
from megatron_muon.mcore.seams import rows, training
from megatron_muon.mcore.seams.row import Row
from megatron_muon.mcore.seams.rows import check_row, check_rows, rows_of
from megatron_muon.presence import SeamError
from support import ROOT
from support.installed import NAME, VERSION
from support.processes import python
from support.virtual_gpu.seams import SEAMS as VIRTUAL_GPU

ROWS = rows_of(VERSION, rows.CORE)
READ = rows_of(VERSION, core_seams.ROWS)
OTHERS = rows._OTHERS.items()
OF_COMMANDS = (*dry_run.ROWS, *bench.ROWS, *cpu_seams.ROWS, *VIRTUAL_GPU)
OPTIONAL = rows_of(VERSION, (*core_seams.REFUSALS, *OF_COMMANDS))
# a branch or a fork may lack what is refused
IS_RELEASE = rows.described_version() == NAME


def named(row: Row) -> str:
    return str(row).removeprefix("megatron.core.")


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    yield
    megatron_muon.uninstall()


@contextmanager
def renamed(row: Row) -> Iterator[None]:
    """Within it what is imported has the symbol by another name."""
    module = importlib.import_module(row.module)
    with ExitStack() as undo:
        *path, name = row.name.split(".")
        if row.use == "held":
            names = rows._names
            undo.callback(setattr, rows, "_names", names)
            rows._names = lambda *where: names(*where) - {name}  # type: ignore
            yield
            return
        holder: Any = module
        for part in path[:-1]:
            holder = getattr(holder, part)
        held = getattr(holder, path[-1]) if path else holder
        if path and (isinstance(held, EnumMeta) or not isinstance(held, type)):
            undo.callback(setattr, holder, path[-1], held)
            # none of its names can be deleted
            setattr(holder, path[-1], SimpleNamespace())
        else:
            _rename(held, name, undo)
        yield


def _rename(holder: Any, name: str, undo: ExitStack) -> None:
    if isinstance(holder, type):  # get_parameters, which a class inherits
        holder = next(base for base in holder.__mro__ if name in vars(base))
    own = vars(holder)[name]
    delattr(holder, name)
    setattr(holder, f"{name}_of_a_fork", own)
    undo.callback(setattr, holder, name, own)
    undo.callback(delattr, holder, f"{name}_of_a_fork")


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_install_names_a_symbol_that_was_renamed(row: Row) -> None:
    needed = f"has no {row}, which megatron_muon needs: {row.relied_on}"
    with renamed(row):
        with pytest.raises(SeamError, match=re.escape(needed)):
            check_row(row, NAME)
        with pytest.raises(SeamError) as caught:
            megatron_muon.install()
    if row.use != "held":
        assert needed in str(caught.value)
    else:  # or of another class, which has it from the same base
        name = row.name.split(".")[-1]
        assert f".{name}, which megatron_muon needs: " in str(caught.value)
    rows.check_hooks()


@pytest.mark.parametrize("row", READ, ids=named)
def test_doctor_names_a_symbol_that_was_renamed(row: Row) -> None:
    needed = f"has no {row}, which megatron_muon needs: {row.relied_on}"
    check_row(row, NAME)
    with renamed(row), pytest.raises(SeamError, match=re.escape(needed)):
        check_row(row, NAME)


def test_a_core_that_is_no_release_is_named_by_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has = megatron.core.optimizer.OptimizerConfig.__dataclass_fields__
    said = [
        f"{whose} (it has {name})" in rows.described_version() for name, whose in OTHERS
    ]
    assert said == [name in has for name, _ in OTHERS]
    monkeypatch.setattr(rows, "_OTHERS", {"lr": "a fork"})
    assert (
        rows.described_version()
        == f"{NAME} by its number, with code of a fork (it has lr)"
    )


@pytest.mark.parametrize("row", OPTIONAL, ids=named)
def test_what_only_a_refusal_or_a_command_needs_stops_no_run(
    row: Row,
) -> None:
    """As Megatron's branch dev lacks generalized tensor parallelism, which is
    refused.
    """
    if not IS_RELEASE and row in core_seams.REFUSALS:
        pytest.skip(f"{NAME} is of a branch or a fork")
    check_rows([row])
    with renamed(row):
        with pytest.raises(SeamError, match=re.escape(f"has no {row}, which")):
            check_rows([row])
        if row in core_seams.REFUSALS:
            megatron_muon.install()


@pytest.mark.parametrize(
    "row", rows_of(VERSION, (*core_seams.HYBRID, *bench.UPSTREAM)), ids=str
)
def test_what_needs_packages_to_be_imported_is_in_the_source(
    row: Row,
) -> None:
    try:
        importlib.import_module(row.module)
    except ImportError:
        assert row.name.split(".")[-1] in names_in_source(row.module)
    else:
        if row.use == "held":
            check_row(row, NAME)
        else:  # some names are imported only where their package is
            assert row.name.split(".")[0] in names_in_source(row.module)


@cache
def names_in_source(module: str) -> frozenset[str]:
    """Names that a module's source defines, imports or assigns to, anywhere."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    names = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(names)


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("megatron.core.optimizer.gone", "anything", "called", "nothing")
    monkeypatch.setattr(rows, "CORE", (*rows.CORE, row))
    with pytest.raises(
        SeamError, match=r"has no megatron\.core\.optimizer\.gone\.anything"
    ):
        megatron_muon.install()


def test_a_symbol_of_megatron_lm_that_was_renamed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for megatron.training, which is in no wheel of every version."""
    wanted = rows_of(VERSION, training.ROWS)
    modules: dict[str, Any] = {}
    for hook in wanted:
        module = modules.setdefault(hook.module, SimpleNamespace())
        setattr(module, hook.name, eval(f"lambda {', '.join(hook.parameters)}: None"))
    monkeypatch.setattr(rows, "importlib", SimpleNamespace(import_module=_of(modules)))
    check_rows(training.ROWS)
    for hook in wanted:
        own = getattr(modules[hook.module], hook.name)
        delattr(modules[hook.module], hook.name)
        with pytest.raises(
            SeamError, match=re.escape(f"has no {hook}, which megatron_muon ")
        ):
            check_rows(training.ROWS)
        setattr(modules[hook.module], hook.name, own)


def _of(modules: dict[str, Any]) -> Any:
    return lambda name: (
        modules[name] if name in modules else importlib.import_module(name)
    )


# --- in processes of their own


def test_a_class_that_the_plugin_imports_by_name_is_named_too() -> None:
    code = "import megatron_muon; megatron_muon.cpu.enable(allow_cuda=True); "
    code += (
        "import megatron.core.optimizer as o; del o.ChainedOptimizer; "
        "megatron_muon.install()"
    )
    done = python("-W", "ignore", "-c", code)
    assert (
        "has no megatron.core.optimizer.ChainedOptimizer, which megatron_muon"
        in done.stderr
    )


_COPY = Path(megatron.core.__file__).parents[1]


def _copy_with_another_name(folder: Path, file: str, name: str) -> None:
    """As a fork has it: everywhere in a file, so that the file itself is whole."""
    copy = folder / "megatron"
    # with what is compiled, which holds for the other files
    shutil.copytree(_COPY, copy)
    source = copy / "core" / file
    source.write_text(re.sub(rf"\b{name}\b", f"{name}_of_a_fork", source.read_text()))


def test_a_copy_of_the_core_with_another_mark_is_refused(tmp_path: Path) -> None:
    """Its absence would go unnoticed."""
    _copy_with_another_name(tmp_path, "tensor_parallel/layers.py", "partition_dim")
    code = "import megatron_muon; megatron_muon.cpu.enable(allow_cuda=True); "
    code += "megatron_muon.install(); print('accepted')"
    done = python("-W", "ignore", "-c", code, path=[tmp_path])
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "accepted" not in done.stdout, done.stderr
    assert last.startswith("megatron_muon.presence.SeamError: megatron-core "), (
        done.stderr
    )
    assert ".partition_dim, which megatron_muon needs: " in last


def test_a_run_over_a_copy_that_lacks_what_is_read_ends_by_its_name(
    tmp_path: Path,
) -> None:
    """``doctor`` says it before, with the way out."""
    _copy_with_another_name(
        tmp_path, "optimizer/distrib_optimizer.py", "shard_fp32_groups"
    )
    run = python(str(ROOT / "examples" / "minimal.py"), path=[tmp_path])
    assert run.returncode != 0
    assert "has no attribute 'shard_fp32_groups'" in run.stderr, run.stderr
    report = python("-W", "ignore", "-m", "megatron_muon", "doctor", path=[tmp_path])
    assert report.returncode == 1
    said = " ".join(report.stdout.split())
    assert ".shard_fp32_groups, which megatron_muon needs: " in said
