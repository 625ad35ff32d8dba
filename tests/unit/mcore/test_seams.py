"""``install()`` refuses a core in which a symbol of the table is gone or renamed, and names it.

Each row is renamed in the real core of this process, which is put back then. `bash tests/run.sh`
does so with every core of tests/cores.txt.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_muon
from megatron_muon.mcore.seams import rows
from megatron_muon.mcore.seams.checkpoint_rows import ARGUMENTS, ATTRIBUTES, GROUP_KEYS
from megatron_muon.mcore.seams.row import Attribute, Hook
from megatron_muon.mcore.seams.rows import (
    SeamError,
    check_arguments,
    check_built,
    check_training_hooks,
    hooks_of,
    training_hooks_of,
)
from support import ROOT
from support.installed import VERSION

ROWS: list[Hook | Attribute] = [*hooks_of(VERSION), *ATTRIBUTES]


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    yield
    megatron_muon.uninstall()


@contextmanager
def renamed(row: Hook | Attribute) -> Iterator[None]:
    """Within it the imported Megatron has the symbol by another name."""
    if isinstance(row, Hook):
        *path, name = row.name.split(".")
        holder: Any = importlib.import_module(row.module)
        for part in path:
            holder = getattr(holder, part)
        if name not in vars(holder):  # get_parameters, which the class has from a base
            holder = next(base for base in holder.__mro__ if name in vars(base))
        own = vars(holder)[name]
        delattr(holder, name)
        setattr(holder, f"{name}_of_a_fork", own)
        try:
            yield
        finally:
            delattr(holder, f"{name}_of_a_fork")
            setattr(holder, name, own)
        return
    module = importlib.import_module(row.module)
    owner = getattr(module, row.owner)
    setattr(module, row.owner, class_without(owner, row.name))
    try:
        yield
    finally:
        setattr(module, row.owner, owner)


def class_without(owner: type, name: str) -> type:
    """The class and its bases from their own source, with an attribute of another name."""
    module = importlib.import_module(owner.__module__)
    file = module.__file__
    assert file is not None
    text = Path(file).read_text()
    source = re.sub(rf"\bself\.{name}\b", f"self.{name}_of_a_fork", text)
    namespace = dict(vars(module))
    for base in owner.__mro__[1:]:  # of another file, as MixedPrecisionOptimizer
        if base.__module__.startswith("megatron.") and base.__module__ != owner.__module__:
            if name in rows._attributes_set(base):
                source = source.replace(f"({base.__name__}", f"(_{base.__name__}")
                namespace[f"_{base.__name__}"] = class_without(base, name)
    own = compile(source, file, "exec", flags=annotations_of(source), dont_inherit=True)
    exec(own, namespace)
    made: type = namespace[owner.__name__]
    return made


def annotations_of(source: str) -> int:
    import __future__

    return __future__.annotations.compiler_flag if "import annotations" in source else 0


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row).removeprefix("megatron.core."))
def test_install_names_a_symbol_that_was_renamed(row: Hook | Attribute) -> None:
    with renamed(row):
        with pytest.raises(SeamError) as caught:
            megatron_muon.install()
    assert f"has no {row}, which megatron_muon needs: {row.relied_on}" in str(caught.value)
    rows.check_hooks()


def test_a_module_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Hook("megatron.core.optimizer.gone", "anything", (), "nothing")
    monkeypatch.setattr(rows, "HOOKS", (*rows.HOOKS, row))
    with pytest.raises(SeamError, match=r"has no megatron\.core\.optimizer\.gone\.anything"):
        megatron_muon.install()


def test_a_symbol_of_megatron_lm_that_was_renamed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for megatron.training, which is in no wheel of every version."""
    wanted = training_hooks_of(VERSION)
    modules: dict[str, Any] = {}
    for hook in wanted:
        module = modules.setdefault(hook.module, SimpleNamespace())
        code = f"lambda {', '.join(hook.parameters)}: None"
        setattr(module, hook.name, eval(code))
    monkeypatch.setattr(rows, "importlib", SimpleNamespace(import_module=_of(modules)))
    check_training_hooks()
    for hook in wanted:
        own = getattr(modules[hook.module], hook.name)
        delattr(modules[hook.module], hook.name)
        with pytest.raises(SeamError, match=re.escape(f"has no {hook}, which megatron_muon")):
            check_training_hooks()
        setattr(modules[hook.module], hook.name, own)


def _of(modules: dict[str, Any]) -> Any:
    return lambda name: modules[name] if name in modules else importlib.import_module(name)


def test_an_argument_that_was_renamed_is_named() -> None:
    args = SimpleNamespace(**dict.fromkeys(ARGUMENTS))
    check_arguments(args)
    for name in ARGUMENTS:
        delattr(args, name)
        with pytest.raises(SeamError, match=f"have no {name}, which megatron_muon needs"):
            check_arguments(args)
        setattr(args, name, None)


@pytest.mark.parametrize("key", GROUP_KEYS)
def test_a_key_of_parameter_groups_that_was_renamed_is_named(key: str) -> None:
    group = dict.fromkeys(GROUP_KEYS, 1)
    value = group.pop(key)
    built = SimpleNamespace(
        **{
            **{row.name: None for row in ATTRIBUTES},
            "buffers": [],
            "optimizer": SimpleNamespace(param_groups=[group]),
        }
    )
    with pytest.raises(SeamError, match=f"a parameter group of .* has no {key}, which"):
        check_built(built)
    group[f"pre_{key}"] = value  # as NeMo has it
    check_built(built)


MCORE = ROOT / "megatron_muon" / "mcore"
SAVING = sorted(
    path for room in ("checkpoint", "interop", "integrity") for path in (MCORE / room).glob("*.py")
)


@pytest.mark.parametrize("file", SAVING, ids=lambda file: file.name)
def test_what_saving_takes_of_megatrons_optimizers_is_in_the_table(file: Path) -> None:
    """Methods that are called or overridden, and attributes that are read."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    source = file.read_text()
    names = set(re.findall(r"(?:super\(\)|part|self)\.(\w+)", source))
    names |= set(re.findall(r"def (\w+)\(self", source))
    in_table = {row.name for row in hooks_of(VERSION)}
    chain = file.name == "chain.py"
    for owner in (ChainedOptimizer,) if chain else (DistributedOptimizer,):
        known = {row.name for row in ATTRIBUTES if row.owner.endswith("Optimizer")}
        for name in names - {"__init__"}:
            if name in vars(owner) and not isinstance(vars(owner)[name], property):
                assert f"{owner.__name__}.{name}" in in_table, name
            elif name in rows._attributes_set(owner):
                assert name in known, name
