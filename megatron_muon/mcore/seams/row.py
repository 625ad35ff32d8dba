"""A row of the table of what this package uses of others' code: see ``rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_muon.presence import NEWEST, OLDEST, Version

__all__ = ["NEWEST", "OLDEST", "Attribute", "Part", "Seam", "Use", "Version"]

# How the package uses a symbol. ``uninstall()`` puts ``wrapped`` and ``replaced`` ones back; one
# that a ``with`` replaces is put back at its end.
Use = Literal["called", "wrapped", "replaced", "overridden", "subclassed", "read"]
# The part of this package that needs a row, and checks it. ``core``, ``torch``: every run with
# Muon, at ``install()``. ``training``: a run that Megatron-LM starts. ``dry_run``:
# commands that build a model on the meta device; ``script``: by a run's own script. ``hybrid``:
# modules that need packages to be imported. ``bench``: the
# benchmark; ``upstream``: its row of Megatron's own Muon. ``traces``: a run whose steps are traced.
# ``cpu``: the runtime without a GPU; ``cpu_training``: the same with Megatron-LM's scripts.
# ``kernels``: checked where the package of kernels is installed.
Part = Literal[
    "core",
    "training",
    "dry_run",
    "script",
    "hybrid",
    "bench",
    "upstream",
    "traces",
    "cpu",
    "cpu_training",
    "torch",
    "kernels",
]


@dataclass(frozen=True, slots=True)
class Seam:
    """A symbol of Megatron, of torch's internals or of a package of kernels.

    Attributes:
        module: the module in which it is looked up at call time.
        name: the symbol's name, with a dot before a class's attribute.
        use: how the package uses it.
        relied_on: the behaviour that the package relies on, printed in errors.
        parameters: names that must be in its signature.
        since, until: the first and the last minor version of Megatron that has it in this shape.
        inherited: the class has it from a base class. If False, the class itself must define it,
            since a base class may have another symbol of that name.
        part: the part of this package that needs it.
    """

    module: str
    name: str
    use: Use
    relied_on: str
    parameters: tuple[str, ...] = ()
    since: Version = OLDEST
    until: Version = NEWEST
    inherited: bool = False
    part: Part = "core"

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of objects, which cannot be looked up in a module as a Seam can.

    The assignments in the methods of the class and its fields tell whether objects have it. An
    optimizer that Megatron has built is asked itself (``check_built``).

    Attributes:
        module, owner: the class. With an empty owner it is a mark, which functions and methods of
            the module set on parameters.
        name: the attribute's name.
        relied_on: the purpose that it is read for, printed in errors.
        of_stubs: a DistributedOptimizer without parameters has it, too.
        since, until, part: as in a Seam.
    """

    module: str
    owner: str
    name: str
    relied_on: str
    of_stubs: bool = False
    since: Version = OLDEST
    until: Version = NEWEST
    part: Part = "core"

    def __str__(self) -> str:
        return ".".join(word for word in (self.module, self.owner, self.name) if word)
