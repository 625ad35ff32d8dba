"""A row of the tables of others' code that this package uses, and the maker of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partialmethod
from typing import Literal

from megatron_muon.presence import NEWEST, OLDEST, Version

# How the package uses a symbol. ``uninstall()`` restores what is ``wrapped`` and
# ``replaced``; a ``with`` restores at its end what it has replaced.
Use = Literal["called", "wrapped", "replaced", "overridden", "subclassed", "read"]


@dataclass(frozen=True, slots=True)
class Seam:
    """A symbol of Megatron, or of torch's internals."""

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
class Attribute:
    """An attribute of objects: code of the class or a field of it sets it."""

    # module, owner: the class. With an empty owner it is a mark, which functions and
    # methods of the module set on parameters.
    module: str
    owner: str
    name: str  # the attribute's name
    relied_on: str  # the purpose that it is read for, printed in errors
    since: Version = OLDEST  # since, until: as in a Seam
    until: Version = NEWEST

    def __str__(self) -> str:
        return ".".join(word for word in (self.module, self.owner, self.name) if word)


Row = Seam | Attribute


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

    def _seam(
        self,
        use: Use,
        symbol: str,
        relied_on: str,
        *,
        since: int | None = None,
        until: int | None = None,
        inherited: bool = False,
    ) -> Seam:
        """A row of ``name`` or, with parameters that it must have, ``name(a, b)``."""
        name, *parameters = re.findall(r"[\w.]+", symbol)
        return Seam(
            self.module,
            f"{self.owner}.{name}" if self.owner else name,
            use,
            relied_on,
            tuple(parameters),
            *self._versions(since, until),
            inherited,
        )

    called = partialmethod(_seam, "called")
    wrapped = partialmethod(_seam, "wrapped")
    replaced = partialmethod(_seam, "replaced")
    overridden = partialmethod(_seam, "overridden")
    subclassed = partialmethod(_seam, "subclassed")
    read = partialmethod(_seam, "read")

    def has(
        self,
        *,
        since: int | None = None,
        until: int | None = None,
        **attributes: str,
    ) -> Iterator[Attribute]:
        """The rows of attributes of the class, or of marks: each with its purpose."""
        versions = self._versions(since, until)
        for name, relied_on in attributes.items():
            yield Attribute(self.module, self.owner, name, relied_on, *versions)

    def _versions(
        self, since: int | None, until: int | None
    ) -> tuple[Version, Version]:
        return (0, since or self.since), (0, until or self.until)
