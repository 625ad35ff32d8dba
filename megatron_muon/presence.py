"""Whether there is a megatron.core; pip installs none unless it is asked for one."""

from __future__ import annotations

import importlib.util
import sys

WAY_OUT = "pip install megatron-muon[core], or put a Megatron-LM checkout on PYTHONPATH"
_NAME = "megatron.core"


class CoreNotFoundError(ModuleNotFoundError):
    """Python finds no megatron.core."""


def has_core() -> bool:
    """Whether Python would find megatron.core; nothing of it is imported."""
    if sys.modules.get(_NAME) is not None:
        return True
    try:
        return importlib.util.find_spec(_NAME) is not None
    except ModuleNotFoundError:  # not even a megatron
        return False


def require_core() -> None:
    """Stop where there is no megatron.core.

    Raises:
        CoreNotFoundError: names both ways to have one.
    """
    if not has_core():
        raise CoreNotFoundError(f"there is no {_NAME}: {WAY_OUT}", name=_NAME)
