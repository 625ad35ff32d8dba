"""A reader of ``torch.save`` files as data: plain objects and CPU tensors, no code from the file.

``torch.load`` with a ``pickle_module`` is not safe. It calls the module's own ``load`` for a file
that is no zip archive, and ``torch.jit.load`` for a TorchScript archive. This reader takes only zip
archives, refuses TorchScript by name, and reads pickles by ``pickles``.

Tensors are mapped from the file, so they are read when they are used. Every size is checked against
the file before a tensor is made.

Source: ``torch/serialization.py`` (``_save``, ``_load``) and ``torch/_utils.py`` at torch 2.13;
older versions down to 1.6 write the same records.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.files.pickles import reader
from megatron_muon.files.pickles.makers import PLAIN, Makers
from megatron_muon.files.pickles.objects import Name, Unknown
from megatron_muon.files.regular import NotRegularError, open_regular

_IS_LINUX = sys.platform == "linux"
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
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
    "UntypedStorage": torch.uint8,
}
# Without MAP_NORESERVE, a private mapping that may be written to counts against free memory, and a
# larger file cannot be mapped. Python names the flag from 3.13 on.
_COPIED = mmap.MAP_PRIVATE | (getattr(mmap, "MAP_NORESERVE", 0x4000) if _IS_LINUX else 0)
_HEADER = struct.Struct("<4s22xHH")  # of a record: signature, lengths of its name and extra field
_SIGNATURE = b"PK\003\004"
_QUANTIZED = "q"  # prefix of dtypes that need more than their elements
DTYPES = {
    ("torch", name): dtype for name, dtype in _DTYPES.items() if not name.startswith(_QUANTIZED)
}


class ArchiveError(ValueError):
    """A file that is no archive of ``torch.save``, or a damaged one."""


def load(path: str | os.PathLike[str]) -> Any:
    """The value that ``torch.save`` wrote into a file; unknown objects are ``Unknown``.

    Raises:
        OSError: it cannot be read.
        ArchiveError: it is no regular file, or no archive of ``torch.save``.
        PickleError: the objects in it are damaged.
    """
    return load_view(mapped(path))


def mapped(path: str | os.PathLike[str]) -> memoryview:
    """A file's bytes, mapped; writes into them stay in memory.

    Raises:
        OSError: it cannot be read.
        ArchiveError: it is no regular file (opening a pipe would wait), or empty.
    """
    try:
        file = open_regular(path)
    except NotRegularError:
        raise ArchiveError("it is no regular file") from None
    with file:
        if not os.fstat(file.fileno()).st_size:
            raise ArchiveError("it is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, flags=_COPIED))


def load_bytes(data: bytes) -> Any:
    """Like ``load``, for bytes that another archive holds."""
    return load_view(memoryview(bytearray(data)))


def load_view(view: memoryview) -> Any:
    """Like ``load``, for bytes in memory or in a mapped file, which tensors go on using."""
    records = _records(view)
    root = next(iter(records)).split("/", 1)[0]
    pickled = records.get(f"{root}/data.pkl")
    if pickled is None:
        raise ArchiveError("it is no file of torch.save: it has no data.pkl")
    order = bytes(records.get(f"{root}/byteorder", memoryview(b"little")))
    if order.decode("ascii", "replace") != sys.byteorder:
        raise ArchiveError(f"its byte order is {order[:16]!r}, this machine's {sys.byteorder}")
    storages = _Storages(records, f"{root}/data/")
    return reader.load(bytes(pickled), _MAKERS, DTYPES, storages.persistent)


# --- the archive ---------------------------------------------------------------------------------


class _Window(io.RawIOBase):
    """A view as a file for ``zipfile``; a read never allocates more than the view has."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError("a place before the file's start")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        stop = len(self._view) if size is None or size < 0 else self._at + size
        data = bytes(self._view[self._at : stop])
        self._at += len(data)
        return data


def _records(view: memoryview) -> dict[str, memoryview]:
    """The archive's records by name. Compressed ones are refused; torch writes none."""
    try:
        with zipfile.ZipFile(_Window(view)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OSError) as error:
        raise ArchiveError(
            "it is no zip archive of torch.save, or cut off (other files, torch's before 1.6 "
            f"among them, are not read: {error})"
        ) from None
    if not entries:
        raise ArchiveError("it is no file of torch.save: an empty zip archive")
    if any(entry.filename.split("/", 1)[-1] == "constants.pkl" for entry in entries):
        raise ArchiveError("it is a TorchScript archive, which is code: none is loaded here")
    return {entry.filename: _record(view, entry) for entry in entries}


def _record(view: memoryview, entry: zipfile.ZipInfo) -> memoryview:
    at, size = entry.header_offset, entry.file_size
    header = bytes(view[at : at + _HEADER.size]) if at >= 0 else b""
    if len(header) == _HEADER.size:
        signature, name, extra = _HEADER.unpack(header)
        start = at + _HEADER.size + name + extra
        stored = entry.compress_type == zipfile.ZIP_STORED and size == entry.compress_size
        if signature == _SIGNATURE and stored and start + size <= len(view):
            return view[start : start + size]
    raise ArchiveError(f"its record {entry.filename!r} is damaged, or compressed")


# --- tensors -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    """A record's bytes, and the dtype of its elements."""

    data: memoryview
    dtype: torch.dtype


class _Storages:
    """Storages, which a pickle calls by number."""

    def __init__(self, records: dict[str, memoryview], folder: str) -> None:
        self._records, self._folder = records, folder

    def persistent(self, saved: Any) -> _Record:
        """The storage of ``("storage", type, key, device, number of elements)``."""
        if not isinstance(saved, tuple) or len(saved) != 5 or saved[0] != "storage":
            raise ArchiveError("it refers to something that is no storage")
        _, kind, key, _, numel = saved
        dtype = _STORAGES.get(kind.name) if isinstance(kind, Name) else None
        if dtype is None or kind.module not in ("torch", "torch.storage"):
            raise ArchiveError(f"a storage is of type {str(kind)[:100]}, which is not read")
        data = self._records.get(f"{self._folder}{key}") if isinstance(key, str) else None
        if data is None:
            raise ArchiveError("the record of a tensor's elements is missing")
        (numel,) = _sizes([numel])
        if numel * dtype.itemsize > len(data):
            raise ArchiveError(f"record {key} has {len(data)} bytes, {numel} of {dtype} are wanted")
        return _Record(data[: numel * dtype.itemsize], dtype)


def _sizes(numbers: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets of a tensor."""
    if not isinstance(numbers, (list, tuple)):
        raise ArchiveError(f"a tensor's size is a {type(numbers).__name__}")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ArchiveError("a tensor's size is no number, negative or huge")
    return tuple(numbers)


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A view of a storage, which must have all of its elements."""
    if not isinstance(storage, _Record):
        raise ArchiveError("a tensor has no storage")
    dtype = storage.dtype if dtype is None else dtype
    (offset,) = _sizes([offset])
    shape, strides = _sizes(size), _sizes(stride)
    if len(shape) != len(strides) or len(shape) > 64:
        raise ArchiveError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
    there = len(storage.data) // dtype.itemsize
    numel = 1
    for length in shape:
        numel *= length
    last = offset + sum((n - 1) * by for n, by in zip(shape, strides, strict=True))
    if numel and (last >= there or numel > there):
        raise ArchiveError(
            f"a tensor of {_short(shape)} by strides {_short(strides)} from {offset} does not fit "
            f"into its storage of {there} elements"
        )
    if not numel:  # torch multiplies the other sizes, and would overflow
        return torch.empty([min(length, 1 << 20) for length in shape], dtype=dtype)
    return _elements(storage.data, dtype, there).as_strided(shape, strides, offset)


def _short(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))


def _elements(data: memoryview, dtype: torch.dtype, count: int) -> torch.Tensor:
    """All elements of a storage, copied where they are not aligned."""
    flat = torch.frombuffer(data, dtype=torch.uint8, count=count * dtype.itemsize)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _rebuild_v2(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """A tensor; the last arguments (requires_grad, hooks, metadata) are not read."""
    return _tensor(storage, offset, size, stride)


def _rebuild_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _: Any, hooks: Any, dtype: Any, *__: Any
) -> torch.Tensor:
    """A tensor of a dtype without a storage type of its own; the storage is untyped."""
    if not isinstance(dtype, torch.dtype):
        raise ArchiveError("a tensor's dtype is none")
    return _tensor(storage, offset, size, stride, dtype)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    if not isinstance(data, (torch.Tensor, Unknown)):
        raise ArchiveError(f"a parameter is made of a {type(data).__name__}")
    return data


def _rebuild_from_type(make: Any, _: Any, args: Any, *__: Any) -> Any:
    """The plain part of a tensor that has attributes or is of a subclass."""
    maker = _TENSORS.get(make) if isinstance(make, Name) else None
    if maker is None or not isinstance(args, tuple):
        return Unknown(make if isinstance(make, Name) else Name("", ""))
    return maker(*args)


def _torch_size(size: Any = ()) -> tuple[int, ...]:
    return _sizes(size)


_TENSORS: Makers = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
}
MAKERS: Makers = {**PLAIN, ("torch", "Size"): _torch_size}
_MAKERS: Makers = {
    **MAKERS,
    **_TENSORS,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
}
