"""Reading files of ``torch.save`` and pickles as data: no name in a file chooses code that runs.

``torch.load`` does the work, with an unpickler whose ``find_class`` knows a few plain names. Any
other class becomes an ``Unknown``, whatever the file does with it. (``weights_only=True`` refuses a
whole file for one enum among Megatron's arguments.) A hostile pickle can still take time and memory
without end, or crash the interpreter; ``lab.inspect`` reads in a process with limits. Megatron
itself unpickles such files without restriction.
"""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from megatron_muon.mcore.load_check.files import NotRegularError, open_regular

_ZIP, _TORCH_SCRIPT = b"PK\003\004", "constants.pkl"


class ReadError(ValueError):
    """A file that neither torch.save nor Megatron has written, or a damaged one."""


class Unknown:
    """An object of a class that is not made; each class has a subclass of this one.

    Attributes:
        named: module and name of the class, or of the function that would have made it.
        state: its attributes, or whatever its class saves; None where it has no state.
    """

    __slots__ = ("state",)
    named = ("", "")
    state: Any

    def __new__(cls, *_: Any, **__: Any) -> Unknown:
        made = object.__new__(cls)
        made.state = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Unknown:
        return type(self)()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Leave out an item, as of a subclass of list."""

    extend = add = append

    def __repr__(self) -> str:
        return f"an object of {'.'.join(self.named)}"


def load(source: Path | bytes) -> Any:
    """The value that ``torch.save`` wrote into a file, or into bytes; its tensors are on the CPU.

    Tensors of a file are mapped: they are read when they are used.

    Raises:
        OSError: it cannot be read.
        ReadError: it is no regular file, no archive of ``torch.save``, or damaged.
    """
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true"):
        raise ReadError("TORCH_FORCE_WEIGHTS_ONLY_LOAD is set: Megatron's files need it unset")
    is_file = isinstance(source, Path)
    with _opened(source) if isinstance(source, Path) else io.BytesIO(source) as file:
        try:
            if file.read(len(_ZIP)) != _ZIP:  # torch's before 1.6, and tar archives
                raise ReadError("it is no archive of torch.save")
            file.seek(0)
            records = torch._C.PyTorchFileReader(file).get_all_records()
            if _TORCH_SCRIPT in records:
                raise ReadError("it is a TorchScript archive, which is code: none is loaded here")
            file.seek(0)
            return torch.load(
                str(source) if is_file else file,
                map_location="cpu",
                pickle_module=SimpleNamespace(__name__=__name__, Unpickler=_Unpickler),
                weights_only=False,
                mmap=is_file,
            )
        except ReadError:
            raise
        except Exception as error:  # there is no list of what a damaged file raises
            raise _damaged("archive of torch.save", error) from None


def load_pickle(path: Path) -> Any:
    """The object that a file of one pickle holds; raises as ``load`` does."""
    with _opened(path) as file:
        try:
            return _Unpickler(file).load()
        except Exception as error:
            raise _damaged("pickle", error) from None


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except NotRegularError:
        raise ReadError("it is no regular file") from None


def _damaged(what: str, error: Exception) -> ReadError:
    line = str(error).partition("\n")[0]
    return ReadError(f"it is no {what}, or damaged: {type(error).__name__}: {line}")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        named = ("builtins" if module == "__builtin__" else module, name)  # protocol 2
        if named in _TYPES:
            return _TYPES[named]
        if named in _MAKERS:
            return lambda *args: _MAKERS[named](*args)  # a pickle may change attributes
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if named == ("torch.storage", "UntypedStorage"):
            return SimpleNamespace(dtype=torch.uint8)  # all that torch asks of it
        if named not in self._classes:
            is_namespace = named == ("argparse", "Namespace")
            base: type = Namespace if is_namespace else Unknown
            space = {} if is_namespace else {"__slots__": (), "named": named}
            self._classes[named] = type(name, (base,), space)
        return self._classes[named]


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    return _view(storage, storage.dtype, offset, size, stride)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any
) -> torch.Tensor:
    """A tensor of a dtype without a storage type of its own; the storage is untyped."""
    return _view(storage, dtype, offset, size, stride)


def _view(storage: Any, dtype: Any, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    """A view of a storage, which must have all of its elements."""
    whole = storage._untyped_storage
    there = whole.nbytes()
    made = torch.empty(0, dtype=dtype).set_(whole, offset, size, stride)
    if whole.nbytes() != there or made.numel() > there:
        raise ReadError(f"a tensor of {tuple(made.shape)} does not fit into its {there} bytes")
    return made


def _encoded(text: str, encoding: str) -> bytes:
    """Bytes in protocol 2."""
    if encoding != "latin1":
        raise ReadError("bytes are in another encoding than latin1")
    return text.encode("latin1")


# Types that no pickle can change, and functions that are called in place of those in a file.
_TYPES: dict[tuple[str, str], type] = {
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytes"): bytes,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("torch", "Size"): torch.Size,
}
_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encoded,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda make, _, args, *__: make(*args),
}
