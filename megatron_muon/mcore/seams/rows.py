"""What a run changes of Megatron, and its comparison with what is installed.

Each symbol that the package wraps, replaces, overrides or subclasses is a row in this
folder's modules, with the behaviour relied on; so are marks, whose absence would go
unnoticed. ``check_hooks`` compares them with the installed megatron-core. What is only
called or read ends by its own name where it is missing; its rows are ``doctor``'s
(``lab/doctor/core_seams.py``), a command's are beside the command. A test holds the
package's syntax trees to all of them.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import types
from collections.abc import Iterable
from functools import cache
from typing import Any

from megatron_muon.mcore.seams import model, optimizer
from megatron_muon.mcore.seams.row import Row
from megatron_muon.presence import SeamError, Version, check_version
from megatron_muon.settings.config import USE_ADAMW

WAY_OUT = (
    "If this Megatron is a fork's, give it the symbol that the release of its version "
    f"has; else take a megatron_muon that knows it, or {USE_ADAMW}"
)
_TORCH_WAY_OUT = (
    "take a megatron_muon that knows this torch, or one that it was tested with"
)

# What every run with Muon needs; ``training`` has what a run of Megatron-LM's scripts
# needs.
CORE: tuple[Row, ...] = (*model.ROWS, *optimizer.ROWS)


def megatron_version() -> tuple[str, Version]:
    """The installed megatron-core's version, as text and as (major, minor), or a
    SeamError.
    """
    text = getattr(importlib.import_module("megatron.core"), "__version__", None)
    if not isinstance(text, str):
        raise _missing(model.ROWS[0], "of no version")
    return text, check_version(text)


# Fields of OptimizerConfig that no release has, and where they come from.
_OTHERS = {
    "chunked_optimizer_state_offload": "NVIDIA's branch dev",
    "low_memory_resume": "radixark's fork",
    "vision_ration": "flagos-ai's fork",
}


def described_version() -> str:
    """The installed megatron-core's version; of a branch or fork, also which one it is
    and the field that shows it.
    """
    fields = importlib.import_module(
        "megatron.core.optimizer"
    ).OptimizerConfig.__dataclass_fields__
    found = [
        f"{source} (it has {name})"
        for name, source in _OTHERS.items()
        if name in fields
    ]
    text, _ = megatron_version()
    return (
        f"{text} by its number, with code of {' and '.join(found)}" if found else text
    )


def rows_of(version: Version, rows: Iterable[Row]) -> list[Row]:
    """The rows that hold for a version of megatron-core."""
    return [row for row in rows if row.since <= version <= row.until]


def wrapped_in_core() -> list[Row]:
    """The symbols of the installed megatron-core that ``install()`` wraps."""
    rows = rows_of(megatron_version()[1], CORE)
    return [row for row in rows if row.use == "wrapped"]


def check_hooks() -> None:
    """``check_rows`` of the rows of every run."""
    check_rows(CORE)


def check_rows(rows: Iterable[Row]) -> None:
    """Compare the rows that hold here with the installed packages; a SeamError names
    one.
    """
    text, version = megatron_version()
    for row in rows_of(version, rows):
        check_row(row, text)


def check_row(row: Row, version: str) -> None:
    """Compare a row that holds here with the installed package; as ``check_rows``."""
    holder = _module(row, version)
    if row.use == "held":
        kind, _, attribute = row.name.rpartition(".")
        owner = getattr(holder, kind, None) if kind else holder
        if owner is None or not has_attribute(owner, attribute):
            raise _missing(row, version)
        return
    for name in row.name.split("."):
        may_inherit = row.inherited or not isinstance(holder, type)
        if not hasattr(holder, name) or not (may_inherit or name in vars(holder)):
            raise _missing(row, version)
        holder = getattr(holder, name)
    if not row.parameters:
        return
    there = inspect.signature(holder).parameters
    missing = [name for name in row.parameters if name not in there]
    if missing:
        raise SeamError(
            f"{row} of megatron-core {version} has no parameter {', '.join(missing)}, "
            f"which megatron_muon needs: {row.relied_on}. {WAY_OUT}"
        )


def _missing(row: Row, version: str) -> SeamError:
    package = row.module.split(".")[0]
    there, way_out = f"megatron-core {version}", WAY_OUT
    if package != "megatron":
        release = getattr(importlib.import_module(package), "__version__", "")
        there, way_out = f"{package} {release}", _TORCH_WAY_OUT
    return SeamError(
        f"{there} has no {row}, which megatron_muon needs: {row.relied_on}. {way_out}"
    )


def _module(row: Row, version: str) -> Any:
    try:
        return importlib.import_module(row.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{row.module}.".startswith(f"{error.name}."):
            raise  # the module is there, but a package that it imports is not
        raise _missing(row, version) from error


_OF_CLASSES = re.compile(r"\bself\.(\w+)|^    (\w+) *[:=]", re.MULTILINE)
_OF_MODULES = re.compile(r"\.(\w+)|['\"](\w+)['\"]")


def has_attribute(owner: type | types.ModuleType, name: str) -> bool:
    """Whether the source of a class, with its bases, has ``self.NAME`` or a field of
    that name.

    A module, of a mark, has ``….NAME``, or the name as a text, which ``setattr`` takes.
    """
    if isinstance(owner, type):
        pattern = _OF_CLASSES
        modules = {base.__module__ for base in owner.__mro__}
    else:
        pattern = _OF_MODULES
        modules = {owner.__name__}
    megatrons = (module for module in modules if module.startswith("megatron."))
    return any(name in _names(module, pattern) for module in megatrons)


@cache
def _names(module: str, pattern: re.Pattern[str]) -> frozenset[str]:
    """What a pattern finds in a module's source, which is read once for all rows."""
    found = pattern.findall(inspect.getsource(importlib.import_module(module)))
    return frozenset(itertools.chain.from_iterable(found))
