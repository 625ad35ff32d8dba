"""A row of the tables of others' code that this package uses, and the maker of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partialmethod
from typing import Literal

from megatron_muon.presence import NEWEST, OLDEST, Version

# How the package uses a symbol. ``uninstall()`` restores what is ``wrapped`` and
# ``replaced``; a ``with`` restores at its end what it has replaced. What is ``held`` is
# an attribute of objects, which code of their class or a field of it sets. Without a
# class it is a mark, which functions and methods of the module set on parameters.
Use = Literal[
    "called", "wrapped", "replaced", "overridden", "subclassed", "read", "held"
]


@dataclass(frozen=True, slots=True)
class Row:
    """A symbol of Megatron or of torch's internals, or an attribute of objects."""

    module: str  # the module in which it is looked up at call time
    name: str  # the symbol's name, with a dot before a class's attribute
    use: Use  # how the package uses it
    relied_on: str  # the behaviour that the package relies on, printed in errors
    parameters: tuple[str, ...] = ()  # names that must be in its signature
    # the first and the last minor version of Megatron with this shape
    since: Version = OLDEST
    until: Version = NEWEST
    inherited: bool = False  # from a base class; else the class itself must define it

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Place:
    """A module of others' code, or a class in it; makes the rows of what it has.

    ``since`` and ``until``, the first and the last N of Megatron 0.N, hold for all rows
    that do not set them.
    """

    module: str
    owner: str = ""
    since: int = OLDEST[1]
    until: int = NEWEST[1]

    def _row(
        self,
        use: Use,
        symbol: str,
        relied_on: str,
        *,
        since: int | None = None,
        until: int | None = None,
        inherited: bool = False,
    ) -> Row:
        """A row of ``name`` or, with parameters that it must have, ``name(a, b)``."""
        name, *parameters = re.findall(r"[\w.]+", symbol)
        return Row(
            self.module,
            f"{self.owner}.{name}" if self.owner else name,
            use,
            relied_on,
            tuple(parameters),
            (0, since or self.since),
            (0, until or self.until),
            inherited,
        )

    called = partialmethod(_row, "called")
    wrapped = partialmethod(_row, "wrapped")
    replaced = partialmethod(_row, "replaced")
    overridden = partialmethod(_row, "overridden")
    subclassed = partialmethod(_row, "subclassed")
    read = partialmethod(_row, "read")

    def has(
        self,
        *,
        since: int | None = None,
        until: int | None = None,
        **attributes: str,
    ) -> Iterator[Row]:
        """The rows of attributes of the class, or of marks: each with its purpose."""
        for name, relied_on in attributes.items():
            yield self._row("held", name, relied_on, since=since, until=until)
