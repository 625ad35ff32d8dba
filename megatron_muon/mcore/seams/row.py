"""A row of the table of what this package uses of others' code: see ``rows``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Minor versions of megatron-core, 0.x, that the plugin was tested with; 20 is main's.
Version = tuple[int, int]
OLDEST, NEWEST = (0, 12), (0, 20)

# The ways to use a symbol. ``wrapped`` and ``replaced`` ones are put back by ``uninstall()``,
# those that are replaced for the time of a ``with`` at its end.
Use = Literal["called", "wrapped", "replaced", "overridden", "subclassed", "read"]
# The part of the package that needs a row, and so checks it. ``core``: every run with Muon, at
# ``install()``. ``training``: a run that Megatron-LM starts. ``dry_run`` and ``hybrid``: commands
# that build a model on the meta device. ``bench``: the benchmark; ``upstream``: its row of
# Megatron's own Muon. ``cpu``: the runtime without a GPU; ``cpu_training``: with Megatron-LM's
# scripts. ``torch``: every run. ``kernels``: where that package is; it says itself what it lacks.
Part = Literal[
    "core",
    "training",
    "dry_run",
    "hybrid",
    "bench",
    "upstream",
    "cpu",
    "cpu_training",
    "torch",
    "kernels",
]


@dataclass(frozen=True, slots=True)
class Seam:
    """A symbol of Megatron, of torch's internals or of a package of kernels.

    Attributes:
        module: where it is looked up at call time.
        name: the symbol's, with a dot for a class's attribute.
        use: the way in which it is used.
        relied_on: the behaviour that the package needs.
        parameters: names that must be in its signature.
        since, until: the first and the last minor version of Megatron that has it in this shape.
        inherited: the class has it from a base class; else it must define it itself, since a base
            class may have another of that name.
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
    """An attribute that objects have; a type of its own, since no module has it to be asked for.

    Whether objects have it is told by the methods, fields and annotations of their class, and of an
    optimizer that Megatron has built by the object itself (``check_built``).

    Attributes:
        module, owner: the class; without an owner it is a mark, which functions and methods of the
            module set on parameters.
        name: the attribute's.
        relied_on: the reason to read it.
        of_stubs: a DistributedOptimizer without parameters has it, too.
        since, until, part: see ``Seam``.
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
