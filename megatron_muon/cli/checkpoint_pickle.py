"""Reading what a checkpoint has pickled without running any of it, and without Megatron.

A pickle names the functions and classes that make its objects. Known here are those that make
tensors, plain containers and torch's records of what is in a file; whatever else is named becomes
an ``Unknown`` that does nothing.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

_CONTAINERS = ("set", "frozenset", "bytearray", "complex", "slice", "range", "list", "dict", "int")
_KNOWN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{("builtins", name): getattr(builtins, name) for name in _CONTAINERS},
    **{
        ("torch._utils", name): getattr(torch._utils, name)
        for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
    },
}


class Unknown:
    """An object of a class that is not known here, with the attributes that it was saved with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Unknown:
        return Unknown(*args)

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class Unpickler(pickle.Unpickler):
    """As ``torch.load`` and ``load_pickle`` use it."""

    def find_class(self, module: str, name: str) -> Any:
        """The function or class of this name, or one that does nothing."""
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in ("torch", "torch.storage"):
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if name.endswith("Storage"):
                return super().find_class(module, name)
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            if isinstance(found, type):
                return found
        return type(name, (Unknown,), {"__module__": module})


def load_pickle(file: Path) -> Any:
    """What is in a file of ``pickle.dump``."""
    with file.open("rb") as stream:
        return Unpickler(stream).load()


def load_torch(file: Any, *, mmap: bool = False) -> Any:
    """What is in a file of ``torch.save``, on the CPU; with ``mmap`` tensors are read when used."""
    return torch.load(
        file,
        map_location="cpu",
        mmap=mmap or None,
        pickle_module=sys.modules[__name__],
        weights_only=False,
    )


# What torch.load also asks of a pickle module.
load, UnpicklingError = pickle.load, pickle.UnpicklingError
