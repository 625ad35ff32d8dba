"""Reading files of ``torch.save`` and pickles as data: no name in a file chooses code that runs.

``torch.load(weights_only=True)`` refuses a whole file for one enum among Megatron's arguments, and
before torch 2.6 it could be made to run code all the same (CVE-2025-32434). Here torch's reader of
archives and Python's unpickler do the work, and ``find_class`` knows a few plain names. Any other
class becomes an ``Unknown``, whatever the file does with it.

Tensors are mapped from the file, so they are read when they are used. A hostile pickle can still
take time and memory without end, or crash the interpreter; ``lab.inspect`` reads in a process with
limits. Megatron itself unpickles such files without restriction.

Source: ``torch/serialization.py`` (``_save``, ``_load``) and ``torch/_utils.py`` at torch 2.13;
older versions down to 1.6 write the same records.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_muon.mcore.load_check.regular_files import NotRegularError, open_regular

# Without MAP_NORESERVE, a private mapping that may be written to counts against free memory, and a
# larger file cannot be mapped. Python names the flag from 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
_TORCH_SCRIPT = "constants.pkl"


class ReadError(ValueError):
    """A file that neither torch.save nor Megatron has written, or a damaged one."""


class Unknown:
    """An object of a class that is not made; each class has a subclass of this one.

    Attributes:
        named: module and name of the class, or of the function that would have made it.
        args: the arguments that it would have been made with.
        state: its attributes, or whatever its class saves; None where it has no state.
    """

    __slots__ = ("args", "state")
    named = ("", "")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Unknown:
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any, **_: Any) -> Unknown:
        return type(self)(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        """Leave out an item, as of a subclass of list."""

    def extend(self, items: Any) -> None:
        """Leave out items."""

    add = append

    def __repr__(self) -> str:
        return f"an object of {'.'.join(self.named)}"


def load(path: Path) -> Any:
    """The value that ``torch.save`` wrote into a file; its tensors are on the CPU.

    Raises:
        OSError: it cannot be read.
        ReadError: it is no regular file, no archive of ``torch.save``, or damaged.
    """
    return _load(str(path), mapped(path))


def load_view(view: memoryview) -> Any:
    """Like ``load``, for bytes in memory or in a mapped file, which tensors go on using."""
    return _load(io.BytesIO(view), view)


def mapped(path: Path) -> memoryview:
    """A file's bytes, mapped; writes into them stay in memory.

    Raises:
        OSError: it cannot be read.
        ReadError: it is no regular file (opening a pipe would wait), or empty.
    """
    with _opened(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise ReadError("it is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NORESERVE))


def load_pickle(path: Path) -> Any:
    """The object that a file of one pickle holds; raises as ``load`` does."""
    with _opened(path) as file:
        return unpickled(file)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except NotRegularError:
        raise ReadError("it is no regular file") from None


def unpickled(file: BinaryIO, persistent: Callable[[Any], Any] | None = None) -> Any:
    """The object that a pickle holds.

    Args:
        file: the pickle.
        persistent: makes an object of a persistent id; None refuses such ids.

    Raises:
        ReadError: it is damaged.
    """
    try:
        return _Unpickler(file, persistent).load()
    except ReadError:
        raise
    except Exception as error:  # Python's has no list of what it raises for a damaged pickle
        raise ReadError(f"its pickle is damaged: {type(error).__name__}: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._persistent = persistent
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        named = ("builtins" if module == "__builtin__" else module, name)  # protocol 2
        if named in _PLAIN:
            return _PLAIN[named]
        if named not in self._classes:
            base = _CLASSES.get(named, Unknown)
            space = {"__slots__": (), "named": named} if base is Unknown else {}
            self._classes[named] = type(name, (base,), space)  # a pickle may change attributes
        return self._classes[named]

    def persistent_load(self, saved: Any) -> Any:
        if self._persistent is None:
            raise ReadError("it refers to an object outside of it")
        return self._persistent(saved)


def _load(source: Any, view: memoryview) -> Any:
    try:
        reader: Any = torch._C.PyTorchFileReader(source)
        is_code = _TORCH_SCRIPT in reader.get_all_records()
        data = reader.get_record("data.pkl")
        order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
    except (RuntimeError, ValueError) as error:  # ValueError: a name in it is no UTF-8
        line = str(error).partition("\n")[0]
        raise ReadError(
            f"it is no archive of torch.save, or damaged (torch's before 1.6 are not read): {line}"
        ) from None
    if is_code:
        raise ReadError("it is a TorchScript archive, which is code: none is loaded here")
    if order.decode("ascii", "replace") != sys.byteorder:
        raise ReadError(f"its byte order is {order[:16]!r}, this machine's {sys.byteorder}")

    def storage(saved: Any) -> torch.Tensor:
        """Bytes of ``("storage", type, key, device, number of elements)``, viewed as its dtype."""
        kind, dtype, key, _, numel = saved
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ReadError(f"it refers to {str(dtype)[:100]}, which is no storage")
        (numel,) = _sizes([numel])
        try:
            start = reader.get_record_offset(f"data/{key}")
        except RuntimeError:
            raise ReadError("the record of a tensor's elements is missing") from None
        count = numel * dtype.itemsize
        if start + count > len(view):
            raise ReadError(f"record {key} ends behind the file: {count} bytes are wanted")
        if not count:
            return torch.empty(0, dtype=dtype)
        flat = torch.frombuffer(view, dtype=torch.uint8, count=count, offset=start)
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype)

    return unpickled(io.BytesIO(data), storage)


# --- the names that are known --------------------------------------------------------------------


def _sizes(numbers: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets of a tensor."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > 64:
        raise ReadError(f"a tensor's size is a {type(numbers).__name__}, or has too many dims")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ReadError("a tensor's size is no number, negative or huge")
    return tuple(numbers)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """A view of a storage, which must have all of its elements."""
    (offset,), shape, strides = _sizes([offset]), _sizes(size), _sizes(stride)
    if not isinstance(storage, torch.Tensor):
        raise ReadError("a tensor has no storage")
    there = storage.numel()
    last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
    numel = 1
    for length in shape:
        numel *= length
    if not numel:  # torch multiplies the other sizes, and would overflow
        return torch.empty([min(length, 1) for length in shape], dtype=storage.dtype)
    if last >= there or numel > there:
        raise ReadError(
            f"a tensor of {shape} by strides {strides} from {offset} does not fit into its "
            f"storage of {there} elements"
        )
    return storage.as_strided(shape, strides, offset)


def _tensor_of_dtype(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, __: Any, dtype: Any, *___: Any
) -> torch.Tensor:
    """A tensor of a dtype without a storage type of its own; the storage is untyped."""
    if not isinstance(storage, torch.Tensor) or not isinstance(dtype, torch.dtype):
        raise ReadError("a tensor has no storage, or no dtype")
    whole = storage.numel() // dtype.itemsize * dtype.itemsize
    return _tensor(storage[:whole].view(dtype), offset, size, stride)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _from_type(make: Any, _: Any, args: Any, *__: Any) -> Any:
    """The plain part of a tensor that has attributes or is of a subclass."""
    return make(*args)


def _items(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """A maker of a container from the items of another one."""

    def maker(*args: Any) -> Any:
        if len(args) > 1 or not all(isinstance(items, (list, tuple, bytes)) for items in args):
            raise ReadError("a container is not made of items")
        return make(*args)

    return maker


def _bytearray(*args: Any) -> bytearray:
    if len(args) == 2 and isinstance(args[0], str) and args[1] == "latin-1":  # protocol 2
        return bytearray(args[0], "latin-1")
    return bytearray(_items(bytes)(*args))


def _encoded(text: Any, encoding: Any) -> bytes:
    """Bytes in protocol 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ReadError("bytes are made of what is no text in latin1")
    return text.encode("latin1")


class _Dict(dict[Any, Any]):
    """An OrderedDict or a defaultdict; what it makes of a missing key is left out."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


_CLASSES: dict[tuple[str, str], type] = {
    ("argparse", "Namespace"): Namespace,
    ("collections", "OrderedDict"): _Dict,
    ("collections", "defaultdict"): _Dict,
    ("builtins", "dict"): _Dict,
}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_PLAIN: dict[tuple[str, str], Any] = {
    ("builtins", "list"): _items(list),
    ("builtins", "set"): _items(set),
    ("builtins", "frozenset"): _items(frozenset),
    ("builtins", "bytes"): _items(bytes),
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("_codecs", "encode"): _encoded,
    ("torch", "Size"): _items(tuple),
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_of_dtype,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch.storage", "UntypedStorage"): torch.uint8,
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    **{
        ("torch", name): dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and not name.startswith("q")  # those need more than data
    },
}
