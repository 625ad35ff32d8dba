"""Distributed Muon for Megatron: ``optimizer='muon'`` over Megatron's own DistributedOptimizer.

Importing this package pulls in neither Megatron nor torch; ``install()`` does the hooking, and
``megatron_muon.cpu.enable()`` lets megatron-core run without a GPU.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_muon.config import MuonConfig
from megatron_muon.version import __version__

if TYPE_CHECKING:
    from megatron_muon import cpu as cpu
    from megatron_muon.runtime.exchange import Meter

__all__ = [
    "MuonConfig",
    "__version__",
    "cpu",
    "install",
    "meter",
    "reading_adamw",
    "reading_megatron_muon",
    "reading_muon",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name == "cpu":  # it needs torch, which importing the package does not
        return importlib.import_module("megatron_muon.cpu")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _require_core() -> None:
    """Say how to get megatron.core where there is none, in place of a bare ModuleNotFoundError."""
    from megatron_muon.presence import require_core

    require_core()


def install(config: MuonConfig | None = None) -> None:
    """Make ``optimizer='muon'`` mean Distributed Muon; see ``mcore.install.install``."""
    _require_core()
    if "megatron_muon.mcore.install" not in sys.modules:  # whose import takes names of Megatron's
        from megatron_muon.mcore.seams.rows import check_hooks

        check_hooks()
    from megatron_muon.mcore.install import install as install_into_megatron

    install_into_megatron(config)


def uninstall() -> None:
    """Give Megatron its own functions back, and Megatron-LM's scripts theirs."""
    _require_core()
    training = sys.modules.get("megatron_muon.megatron_lm.install")
    if training is not None:
        training.uninstall_training()
    from megatron_muon.mcore.install import uninstall as uninstall_from_megatron

    uninstall_from_megatron()


def reading_adamw(
    optimizer: Any, momentum: Literal["momentum", "fresh"]
) -> AbstractContextManager[None]:
    """Within it Muon loads AdamW's checkpoint; see ``mcore.interop.switch.reading_adamw``."""
    _require_core()
    from megatron_muon.mcore.interop.switch import reading_adamw as reading

    return reading(optimizer, momentum)


def reading_megatron_muon(optimizer: Any, folder: str | Path) -> AbstractContextManager[None]:
    """Within it Muon loads the checkpoint of Megatron's own Muon that is in a folder; see
    ``mcore.interop.switch.reading_megatron_muon``.
    """
    _require_core()
    from megatron_muon.mcore.interop.switch import reading_megatron_muon as reading

    return reading(optimizer, folder)


def reading_muon(optimizer: Any, folder: str | Path) -> AbstractContextManager[None]:
    """Within it AdamW loads the checkpoint of Muon's that is in a folder; see
    ``mcore.interop.adamw_after_muon.reading_muon``.
    """
    _require_core()
    from megatron_muon.mcore.interop.adamw_after_muon import reading_muon as reading
    from megatron_muon.mcore.interop.switch import record_of

    return reading(optimizer, record_of(folder)["settings"])


def meter(optimizer: Any) -> Meter:
    """What this rank did for Muon in the last step; see ``mcore.install.meter``."""
    _require_core()
    from megatron_muon.mcore.install import meter as meter_of

    return meter_of(optimizer)
