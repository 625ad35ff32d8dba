"""A replacement: a name, the reason, and what puts it in place with its undo."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megatron_muon.runtime.patches import Patches


@dataclass(frozen=True)
class Replacement:
    """One thing that stands in for the GPU.

    Attributes:
        when: whether it needs Megatron imported.
        for_modules: local modules are not built without it, whatever the device: a GPU run has
            Transformer Engine's in their place.
    """

    name: str
    why: str
    apply: Callable[[Patches], None] = field(repr=False)
    when: Literal["before megatron", "after megatron"] = "before megatron"
    for_modules: bool = False
