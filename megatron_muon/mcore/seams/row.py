"""A row of the tables of what the plugin relies on in Megatron: see ``rows``."""

from __future__ import annotations

from dataclasses import dataclass

# Minor versions of megatron-core, 0.x, that the plugin was tested with; 20 is main's.
Version = tuple[int, int]
OLDEST, NEWEST = (0, 12), (0, 20)


@dataclass(frozen=True, slots=True)
class Hook:
    """A symbol of Megatron.

    Attributes:
        module: where it is looked up at call time.
        name: of the symbol, with a dot for a class's attribute.
        parameters: those that must be in its signature.
        relied_on: what the plugin needs it to do.
        since, until: the first and the last minor version that has it in this shape.
        inherited: the class has it from a base class; else it must define it itself, since a base
            class may have another of that name.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    relied_on: str
    since: Version = OLDEST
    until: Version = NEWEST
    inherited: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute that objects of a class of Megatron's have.

    Attributes:
        module, owner: the class.
        name: of the attribute.
        relied_on: what it is read for.
        of_stubs: a DistributedOptimizer without parameters has it, too.
    """

    module: str
    owner: str
    name: str
    relied_on: str
    of_stubs: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}"
