"""The check for megatron.core, which pip installs only with the extra ``core``."""

from __future__ import annotations

import importlib.util
import sys

WAY_OUT = "pip install megatron-muon[core], or put a Megatron-LM checkout on PYTHONPATH"
_NAME = "megatron.core"


class CoreNotFoundError(ModuleNotFoundError):
    """Python finds no megatron.core."""


def has_core() -> bool:
    """Whether Python would find megatron.core, without importing it."""
    if sys.modules.get(_NAME) is not None:
        return True
    try:
        return importlib.util.find_spec(_NAME) is not None
    except ModuleNotFoundError:  # there is no package megatron either
        return False


def require_core() -> None:
    """Raise an error where there is no megatron.core.

    Raises:
        CoreNotFoundError: names both ways to get one.
    """
    if not has_core():
        raise CoreNotFoundError(f"there is no {_NAME}: {WAY_OUT}", name=_NAME)
