"""Files that write a canary when they are loaded by what trusts them: one builder for each way."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Touch:
    """Its pickle runs a command that makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def plain_pickle(canary: Path) -> bytes:
    """No archive: torch.load reads its magic number by ``pickle_module.load``."""
    return pickle.dumps(Touch(canary))


def old_torch(canary: Path) -> bytes:
    """As torch before 1.6 wrote, whose system information runs the command."""
    parts = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, Touch(canary)]
    return b"".join(pickle.dumps(part, protocol=2) for part in parts)


def oldest_torch(canary: Path) -> bytes:
    """A tar, as torch before 0.1.10 wrote: the number of storages runs the command."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:") as tar:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            data = plain_pickle(canary)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def archive(canary: Path) -> bytes:
    """As torch.save writes, with the command in it."""
    file = io.BytesIO()
    torch.save({"args": Touch(canary), "model": {}}, file)
    return file.getvalue()


class _Module(torch.nn.Module):
    """TorchScript that maps a file, and so makes it, when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self):  # type: ignore[no-untyped-def]
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]):  # type: ignore[no-untyped-def]
        made = torch.from_file(state[0], True, 4)
        self.path = state[0]
        self.training = made.numel() > 4


def torch_script(canary: Path) -> bytes:
    """torch.load hands it to torch.jit.load."""
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(_Module(str(canary))), file)
    return file.getvalue()


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    attack.__name__: attack
    for attack in (plain_pickle, old_torch, oldest_torch, archive, torch_script)
}


def trusted(attack: str, file: Path) -> None:
    """Load it as what trusts a file does."""
    try:
        if attack == "plain_pickle":
            pickle.loads(file.read_bytes())
        else:
            torch.load(file, weights_only=False)
    except Exception:  # it has done its deed by then, or its canary tells
        pass


# --- pickles of opcodes, as no pickler writes them -----------------------------------------------


def _global(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _attribute_of(target: bytes, name: str, value: bytes) -> bytes:
    """BUILD with a pair: Python's unpickler calls setattr(target, name, value)."""
    return b"\x80\x02" + target + b"(N}" + _text(name) + value + b"s\x86b."


STRANGE = {
    "an attribute of a class": _attribute_of(_global("argparse", "Namespace"), "canary", b"K\x01"),
    "defaults of a function": _attribute_of(
        _global("torch._utils", "_rebuild_tensor_v2"), "__defaults__", b"K\x01\x85"
    ),
    "an attribute of a module": b"\x80\x02" + _global("torch.distributed", "is_available") + b".",
    "a name with dots": b"\x80\x04\x8c\x05torch\x8c\x0fos.path.abspath\x93.",
    "getattr": b"\x80\x02" + _global("builtins", "getattr") + b"K\x01" + _text("real") + b"\x86R.",
    "eval": b"\x80\x02" + _global("builtins", "eval") + _text("1/0") + b"\x85R.",
    "a known class with keywords": b"\x80\x04"
    + _global("builtins", "list")
    + b")}"
    + _text("x")
    + b"K\x01s\x92.",
    "an extension": b"\x80\x02\x82\x01.",
    "INST": b"\x80\x02(ios\ngetcwd\n.",
    "OBJ": b"\x80\x02(" + _global("os", "getcwd") + b"o.",
    "text of protocol 0": b"\x80\x02S'x'\n.",
    "a memo of 2**32": b"\x80\x02N" + b"r\xff\xff\xff\xff" + b".",
    "a key of many tuples": b"\x80\x02})" + b"\x85" * (2 * 10**5) + b"Ns.",
    "many lists": b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "bytes of 2**60": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".",
    "a bytearray of 2**60": b"\x80\x02"
    + _global("builtins", "bytearray")
    + b"\x8a\x08"
    + struct.pack("<q", 1 << 60)
    + b"\x85R.",
    "a list of a range": b"\x80\x02"
    + _global("builtins", "list")
    + _global("builtins", "range")
    + b"\x8a\x08"
    + struct.pack("<q", 1 << 60)
    + b"\x85R\x85R.",
    "nothing": b"",
    "a stop": b".",
    "marks": b"\x80\x02((((.",
    "a persistent id": b"\x80\x02K\x01Q.",
}


def zipped(pickled: bytes, records: dict[str, bytes] | None = None, **how: Any) -> bytes:
    """An archive with this pickle in it."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **how) as zip_file:
        for name, data in {"data.pkl": pickled, "version": b"3\n", **(records or {})}.items():
            zip_file.writestr(f"archive/{name}", data)
    return file.getvalue()


def tensor_pickle(
    numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], kind: str = "Float"
) -> bytes:
    """A tensor of record 0 with these sizes, whether they are possible or not."""
    storage = b"(" + _text("storage") + _global("torch", f"{kind}Storage") + _text("0")
    storage += _text("cpu") + _number(numel) + b"tQ"
    numbers = [b"(" + b"".join(map(_number, sizes)) + b"t" for sizes in (size, stride)]
    rebuild = _global("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + _number(offset)
    return b"\x80\x02" + rebuild + b"".join(numbers) + b"\x89}tR."


def _number(number: int) -> bytes:
    data = number.to_bytes(9, "little", signed=True)
    return b"\x8a\x09" + data
