"""A CUDA device guard that does nothing, for a CPU build of torch.

Indexing, ``copy_`` and much else of a tensor on ``cuda`` enter such a guard in C++ before any
dispatch, and a CPU build has none. Two lines of C++ register torch's own no-op guard; g++ builds
them in about a second, once for each torch, into the environment's or the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

_SOURCE = """\
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard); }
"""


@cache
def register_guard() -> None:
    """Register the guard in this process; twice is once.

    Raises:
        RuntimeError: this torch is built with CUDA and has its own, or g++ is missing or fails.
    """
    if torch.backends.cuda.is_built():
        raise RuntimeError("the virtual GPU needs a CPU build of torch: this one has real CUDA")
    torch.ops.load_library(str(_built(_folder())))


def _folder() -> Path:
    """A folder that outlives the process: the environment's, or one of the user's own."""
    inside = Path(sys.prefix) / "share" / "virtual_gpu"
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return inside
    return Path(tempfile.gettempdir()) / f"virtual_gpu-{os.getuid()}"


def _built(folder: Path) -> Path:
    """The library in ``folder``, compiled if it is not there yet."""
    key = hashlib.sha256(f"{torch.__version__} {torch.__path__[0]} {_SOURCE}".encode()).hexdigest()
    library = folder / f"guard-{key[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = Path(torch.__path__[0])
    with tempfile.TemporaryDirectory(dir=folder) as build:  # several processes may build at once
        source, made = Path(build) / "guard.cpp", Path(build) / "guard.so"
        source.write_text(_SOURCE)
        command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}"]
        command += [str(source), "-o", str(made), f"-L{root / 'lib'}", "-lc10"]
        command.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise RuntimeError("the virtual GPU needs g++ to build its device guard") from error
        if done.returncode:
            raise RuntimeError(f"g++ could not build the device guard:\n{done.stderr[-2000:]}")
        os.replace(made, library)
    return library
