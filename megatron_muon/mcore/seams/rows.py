"""The one table of others' code that this package uses, and its comparison with what is installed.

The package calls, wraps, replaces, overrides or reads symbols of Megatron, of torch's internals and
of packages of kernels. Each is a row in this folder's modules, with the behaviour relied on: read
them to know what an upgrade can break. A test holds the package's syntax trees to the table.

``check_hooks`` compares the rows of every run with the installed megatron-core and torch.
``check_training_hooks`` does so for the rows of Megatron-LM, ``check_part`` for those of a command.
``check_built`` compares attributes with an optimizer that Megatron has built. All raise an error
that names the symbol.
"""

from __future__ import annotations

import ast
import dis
import importlib
import importlib.util
import inspect
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megatron_muon.mcore.seams import (
    bench,
    checkpointing,
    cpu,
    dry_run,
    model,
    optimizer,
    parallel,
    torch_internals,
    training,
)
from megatron_muon.mcore.seams.optimizer import GROUP_KEYS
from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Attribute, Part, Seam, Version
from megatron_muon.mcore.seams.training import ARGUMENTS
from megatron_muon.presence import SeamError, check_version

__all__ = ["ATTRIBUTES", "NEWEST", "OLDEST", "SEAMS", "Seam", "SeamError", "Version"]

_WAY_OUT = (
    "If this Megatron is a fork's, give it the symbol that the release of its version has; else "
    "take a megatron_muon that knows it, or choose optimizer='adam'"
)
_WRAPPED_WAY_OUT = (
    "if it is a fork's, give it the function that the release of its version has; else take a "
    "megatron_muon that knows it, or run the script without it"
)
_TORCH_WAY_OUT = "take a megatron_muon that knows this torch, or one that it was tested with"

SEAMS: tuple[Seam, ...] = (
    *model.SEAMS,
    *optimizer.SEAMS,
    *parallel.SEAMS,
    *checkpointing.SEAMS,
    *training.SEAMS,
    *dry_run.SEAMS,
    *bench.SEAMS,
    *bench.PACKAGES,
    *cpu.SEAMS,
    *cpu.TRAINING,
    *torch_internals.SEAMS,
)
ATTRIBUTES: tuple[Attribute, ...] = (
    *model.ATTRIBUTES,
    *optimizer.ATTRIBUTES,
    *parallel.ATTRIBUTES,
    *bench.ATTRIBUTES,
)
_CORE: tuple[Part, ...] = ("core", "torch")  # the parts of every run


def check_built(dist_opt: Any) -> None:
    """Compare the rows of attributes with a DistributedOptimizer that Megatron has built.

    Raises:
        SeamError: names the attribute, or the key of a parameter group.
    """
    is_stub = getattr(dist_opt, "is_stub_optimizer", False)
    rows = [row for row in optimizer.ATTRIBUTES if row.part == "core"]
    for attribute in rows:
        if attribute.owner == "DistributedOptimizer" and (attribute.of_stubs or not is_stub):
            _require(dist_opt, attribute)
    if is_stub:
        return
    for buffer in dist_opt.buffers:
        for attribute in rows:
            if attribute.owner == "_ParamAndGradBuffer":
                _require(buffer, attribute)
            elif attribute.owner == "_ParamAndGradBucket":
                _require(buffer.buckets[0], attribute)
    for group in dist_opt.optimizer.param_groups:
        for key, relied_on in GROUP_KEYS.items():
            if key not in group and f"pre_{key}" not in group:
                raise SeamError(
                    f"a parameter group of megatron-core {megatron_version()[0]} has no {key}, "
                    f"which megatron_muon needs: {relied_on}. {_WAY_OUT}"
                )


def _require(built: Any, attribute: Attribute) -> None:
    if not hasattr(built, attribute.name):
        raise SeamError(
            f"{type(built).__name__} of megatron-core {megatron_version()[0]} has no "
            f"{attribute.name}, which megatron_muon needs: {attribute.relied_on}. {_WAY_OUT}"
        )


def check_arguments(args: Any) -> None:
    """Check that Megatron-LM's arguments, once validated, have all that this package reads.

    Raises:
        SeamError: names the missing argument.
    """
    for name, relied_on in ARGUMENTS.items():
        if not hasattr(args, name):
            raise SeamError(
                f"the arguments of Megatron-LM of core {megatron_version()[0]} have no {name}, "
                f"which megatron_muon needs: {relied_on}. {_WAY_OUT}"
            )


def megatron_version() -> tuple[str, Version]:
    """The installed megatron-core's version, as text and as (major, minor).

    Raises:
        SeamError: megatron-core has no version, or one that is not supported.
    """
    text = getattr(importlib.import_module("megatron.core"), "__version__", None)
    if not isinstance(text, str):
        raise _missing(model.SEAMS[0], "of no version")
    return text, check_version(text)


def seams_of(version: Version, *parts: Part) -> list[Seam]:
    """The rows of symbols that some parts of this package need with a version of megatron-core."""
    return [row for row in SEAMS if row.part in parts and row.since <= version <= row.until]


def attributes_of(version: Version, *parts: Part) -> list[Attribute]:
    """The rows of attributes that they need with that version."""
    return [row for row in ATTRIBUTES if row.part in parts and row.since <= version <= row.until]


def rows_of(version: Version, *parts: Part) -> list[Seam | Attribute]:
    """The rows of symbols, then those of attributes."""
    return [*seams_of(version, *parts), *attributes_of(version, *parts)]


def hooks_of(version: Version) -> list[Seam | Attribute]:
    """The rows of every run, which ``install()`` checks."""
    return rows_of(version, *_CORE)


def training_hooks_of(version: Version) -> list[Seam]:
    """The rows of the Megatron-LM that comes with a version of megatron-core."""
    return seams_of(version, "training")


def check_hooks() -> None:
    """Compare the rows of every run with the installed megatron-core and torch.

    Raises:
        SeamError: names the version or the symbol, and the way out.
    """
    text, version = megatron_version()
    for row in hooks_of(version):
        check_row(row, text)


def check_training_hooks() -> None:
    """Compare the rows of Megatron-LM with the one that is imported.

    Raises:
        SeamError: names the symbol, and the way out.
    """
    check_part("training")


def check_part(*parts: Part) -> None:
    """Compare the rows of some parts of this package with the installed packages.

    Raises:
        SeamError: names the symbol, and the way out.
    """
    text, version = megatron_version()
    for row in rows_of(version, *parts):
        check_row(row, text)


def check_row(row: Seam | Attribute, version: str) -> None:
    """Compare a row with the installed package.

    Args:
        row: a row that holds for the installed version.
        version: megatron-core's version, for errors.

    Raises:
        SeamError: names the symbol and the way out.
    """
    if isinstance(row, Attribute):
        _check_attribute(row, version)
    else:
        _check_symbol(row, version)


def _check_symbol(row: Seam, version: str) -> None:
    try:
        symbol = _module(row, version)
    except ImportError:
        if row.part != "hybrid":
            raise
        _check_source(row, version)  # packages that its import needs are missing
        return
    for part in row.name.split("."):
        own = not isinstance(symbol, type) or row.inherited or part in vars(symbol)
        symbol = getattr(symbol, part, _ABSENT) if own else _ABSENT
        if symbol is _ABSENT and row.part == "upstream":
            _check_source(row, version)  # imported only where its package is installed
            return
        if symbol is _ABSENT:
            raise _missing(row, version)
    if not row.parameters:
        return
    there = inspect.signature(symbol).parameters
    missing = [name for name in row.parameters if name not in there]
    if missing:
        raise SeamError(
            f"{row} of megatron-core {version} has no parameter {', '.join(missing)}, which "
            f"megatron_muon needs: {row.relied_on}. {_WAY_OUT}"
        )


_ABSENT = object()


def _missing(row: Seam | Attribute, version: str) -> SeamError:
    if row.module.split(".")[0] != "megatron":
        package = row.module.split(".")[0]
        here = getattr(importlib.import_module(package), "__version__", "")
        return SeamError(
            f"{package} {here} has no {row}, which megatron_muon needs: {row.relied_on}: "
            f"{_TORCH_WAY_OUT}"
        )
    if row.part == "training" and isinstance(row, Seam) and row.use == "wrapped":
        return SeamError(
            f"the Megatron-LM of core {version} has no {row}, which megatron_muon wraps: "
            f"{_WRAPPED_WAY_OUT}"
        )
    return SeamError(
        f"megatron-core {version} has no {row}, which megatron_muon needs: {row.relied_on}. "
        f"{_WAY_OUT}"
    )


def _module(row: Seam | Attribute, version: str) -> Any:
    try:
        return importlib.import_module(row.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{row.module}.".startswith(f"{error.name}."):
            raise  # the module is there, but a package that it imports is not
        raise _missing(row, version) from error


def _check_source(row: Seam | Attribute, version: str) -> None:
    """Look for a name in the source of a module that cannot be imported here."""
    if row.name.split(".")[0] not in _names_in_source(row.module):
        raise _missing(row, version)


@cache
def _names_in_source(module: str) -> frozenset[str]:
    """Names that a module's source defines, imports or assigns to, anywhere."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return frozenset()
    names = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(names)


def _check_attribute(row: Attribute, version: str) -> None:
    """Look for an attribute among those that the code sets: no object exists yet to be asked."""
    try:
        module = _module(row, version)
    except ImportError:
        if row.part != "hybrid":
            raise
        _check_source(row, version)
        return
    owner = module if not row.owner else getattr(module, row.owner, None)
    if owner is None or not sets_attribute(owner, row.name):
        raise _missing(row, version)


def sets_attribute(owner: type | types.ModuleType, name: str) -> bool:
    """Whether code sets an attribute, or a class has a field of that name.

    Args:
        owner: a class, whose methods are asked, inherited ones too; or a module, whose functions
            and methods are asked, and whose ``setattr`` counts, too.
        name: the attribute.
    """
    if isinstance(owner, type):
        return name in getattr(owner, "__dataclass_fields__", ()) or _stores(_members(owner), name)
    own = _functions(owner)
    return _stores(own, name) or any(name in _words(_code(each)) for each in own)


@cache
def _members(owner: type) -> list[Any]:
    classes = [each for each in owner.__mro__ if each.__module__.startswith("megatron.")]
    return [member for each in classes for member in vars(each).values()]


@cache
def _functions(module: types.ModuleType) -> list[Any]:
    members = list(vars(module).values())
    classes = [each for each in members if isinstance(each, type)]
    members += [member for each in classes for member in vars(each).values()]
    return [member for member in members if getattr(member, "__module__", "") == module.__name__]


def _stores(members: list[Any], name: str) -> bool:
    """Whether one of these functions has ``….name = …``."""
    codes = (code for code in map(_code, members) if code is not None and name in code.co_names)
    return any(name in _stored(code) for code in codes)


@cache
def _stored(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function sets, read once: taking it apart is slow."""
    steps = dis.get_instructions(code)
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def _code(member: Any) -> types.CodeType | None:
    function = inspect.unwrap(getattr(member, "__func__", member))
    code: types.CodeType | None = getattr(function, "__code__", None)
    return code


def _words(value: Any) -> Iterator[str]:
    """Texts among a function's constants: the names given to ``setattr`` are some of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, types.CodeType):
        for each in value.co_consts:
            yield from _words(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from _words(each)
