"""Distributed Muon for Megatron: ``optimizer='muon'`` over Megatron's own
DistributedOptimizer.

Importing this package pulls in neither Megatron nor torch; ``install()`` does the
hooking, and ``megatron_muon.cpu.enable()`` lets megatron-core run without a GPU.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_muon.presence import (
    CoreNotFoundError,
    MuonError,
    SeamError,
    require_core,
)
from megatron_muon.settings import left
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.rules import OwnRule, register_rule
from megatron_muon.version import __version__

if TYPE_CHECKING:
    from megatron_muon import cpu as cpu
    from megatron_muon.mcore.checkpoint.manifest import DigestError as DigestError
    from megatron_muon.orthogonalize.matmul import KernelError as KernelError
    from megatron_muon.runtime.collectives import PhaseError as PhaseError
    from megatron_muon.runtime.consensus import PlanMismatchError as PlanMismatchError
    from megatron_muon.runtime.exchange.meter import Meter

__all__ = [
    "CoreNotFoundError",
    "DigestError",
    "KernelError",
    "MuonConfig",
    "MuonError",
    "OwnRule",
    "PhaseError",
    "PlanMismatchError",
    "SeamError",
    "__version__",
    "cpu",
    "install",
    "meter",
    "numbers",
    "reading_adamw",
    "reading_megatron_muon",
    "reading_muon",
    "register_rule",
    "uninstall",
]


# Modules of the public errors that importing the package does not load.
_ERRORS = {
    "DigestError": "megatron_muon.mcore.checkpoint.manifest",
    "KernelError": "megatron_muon.orthogonalize.matmul",
    "PhaseError": "megatron_muon.runtime.collectives",
    "PlanMismatchError": "megatron_muon.runtime.consensus",
}


def __getattr__(name: str) -> Any:
    if name == "cpu":  # it needs torch, which importing the package does not
        return importlib.import_module("megatron_muon.cpu")
    if name in _ERRORS:
        return getattr(importlib.import_module(_ERRORS[name]), name)
    if name in left.NAMES:
        raise AttributeError(f"megatron_muon.{name} was removed: {left.NAMES[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install(config: MuonConfig | None = None) -> None:
    """Make ``optimizer='muon'`` mean Distributed Muon in the Megatron of this process.

    Modules that have imported ``get_megatron_optimizer`` by name get the plugin's. A
    reference that is kept elsewhere, in a local variable say, raises an error that says
    so when it is called. A second ``install`` only sets the config of optimizers built
    from then on, if it has one.

    Args:
        config: the settings; Moonlight's where None on the first call.

    Raises:
        ModuleNotFoundError: there is no megatron.core; says how to get one.
        SeamError: this Megatron's version is not supported, or it lacks a symbol that
            the plugin relies on, or has it in another form; names the version or the
            symbol.
        TypeError: ``config`` is no MuonConfig.
    """
    require_core()
    if "megatron_muon.mcore.wiring.install" not in sys.modules:
        from megatron_muon.mcore.seams.rows import check_hooks

        check_hooks()
    from megatron_muon.mcore.wiring.install import install as install_into_megatron

    install_into_megatron(config)


def uninstall() -> None:
    """Give Megatron its own functions back, and Megatron-LM's scripts theirs.

    Optimizers already built stay as they are.
    """
    require_core()
    training = sys.modules.get("megatron_muon.megatron_lm.install")
    if training is not None:
        training.uninstall_training()
    from megatron_muon.mcore.wiring.install import uninstall as uninstall_from_megatron

    uninstall_from_megatron()


def reading_adamw(
    optimizer: Any, momentum: Literal["momentum", "fresh"]
) -> AbstractContextManager[None]:
    """A context in which Muon loads a checkpoint of AdamW's. Every rank of the world
    enters it.

    Load the model first: at the end, main parameters are compared with it. After an
    error the optimizer is refused at steps and saves if it has loaded anything, until a
    next load.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='muon'``.
        momentum: ``momentum`` starts Muon's momentum as exp_avg / (1 - β1), with the
            checkpoint's β1; ``fresh`` starts it at zero.

    Raises:
        ValueError: main parameters do not round to the model's; names one.
        RuntimeError: another rank has an error, and this one has none.
    """
    require_core()
    from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw as reading

    return reading(optimizer, momentum)


def reading_megatron_muon(
    optimizer: Any, folder: str | Path
) -> AbstractContextManager[None]:
    """A context in which Muon loads a checkpoint of Megatron's own Muon; all ranks
    enter it.

    Main parameters, momentum and AdamW's state go on at any topology. Load the model
    first: at the end, main parameters are compared with it. An error is as in
    ``reading_adamw``.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='muon'``.
        folder: the folder of one iteration, saved in torch_dist. The format that this
            run saves in does not matter.

    Raises:
        ValueError: the folder has no such checkpoint, or main parameters do not round
            to the model's; names what is wrong.
        RuntimeError: another rank has an error, and this one has none.
    """
    require_core()
    from megatron_muon.mcore.checkpoint.interop.switch import (
        reading_megatron_muon as reading,
    )

    return reading(optimizer, folder)


def reading_muon(optimizer: Any, folder: str | Path) -> AbstractContextManager[None]:
    """A context in which AdamW loads a checkpoint of this plugin's Muon; all ranks
    enter it.

    After an error the optimizer is as it was before, or refused at steps and saves if
    it has loaded anything, until a next load.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='adam'``
            with the distributed optimizer.
        folder: the folder of one iteration, saved by this plugin.

    Raises:
        ValueError: the checkpoint lacks something; names it.
        RuntimeError: another rank has an error, and this one has none.
    """
    require_core()
    from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import (
        reading_muon as reading,
    )
    from megatron_muon.mcore.checkpoint.interop.saved import Saved

    return reading(optimizer, Saved.of(folder).settings())


def meter(optimizer: Any) -> Meter:
    """Counts of this rank's work for Muon in the last step.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='muon'``.

    Raises:
        TypeError: the optimizer is not Muon's.
    """
    require_core()
    from megatron_muon.mcore.wiring.install import meter as meter_of

    return meter_of(optimizer)


def numbers(optimizer: Any) -> dict[str, float]:
    """The last step's numbers of layers and kinds of matrices, as
    ``{"muon_NUMBER/ROW": value}``; one that could not be computed is NaN.

    Empty where the step was no logging step: those are every ``log_interval``-th. All
    ranks of the chain have the same numbers, and none communicates here.

    Args:
        optimizer: the result of ``get_megatron_optimizer`` for ``optimizer='muon'``.

    Raises:
        TypeError: the optimizer is not Muon's.
    """
    require_core()
    from megatron_muon.mcore.wiring.install import numbers as numbers_of

    return numbers_of(optimizer)
