"""A CUDA device guard that does nothing, for the time that the virtual GPU is on.

Indexing, ``copy_`` and much else of a tensor on ``cuda`` enter a device guard in C++
before any dispatch. A CPU build of torch has none, and a CUDA build's asks the driver.
Torch's own guard of the meta device does nothing. Within ``without_driver`` it stands
in CUDA's place in torch's table of guards
(``c10/core/impl/DeviceGuardImplInterface.h``, torch 2.4 to 2.13). No compiler is
needed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_TABLE = (
    "_ZN3c104impl26device_guard_impl_registryE"  # a pointer for each type of device
)
_CUDA, _META = 1, 14  # c10/core/DeviceType.h
_LIBRARIES = ("libc10.so", "libc10.dylib")
_HIDING = "CUDA_VISIBLE_DEVICES"


@contextmanager
def without_driver() -> Iterator[None]:
    """Within it no guard of a CUDA device does anything, and CUDA's runtime finds no
    device.

    The second holds where CUDA was not used in this process before. Afterwards all is
    as it was.
    """
    guards = _guards()
    if not guards[_META]:
        raise RuntimeError(
            f"torch {torch.__version__} has no device guard for the meta device"
        )
    own, hidden = guards[_CUDA], os.environ.get(_HIDING)
    guards[_CUDA] = guards[_META]
    os.environ[_HIDING] = ""
    try:
        yield
    finally:
        guards[_CUDA] = own
        if hidden is None:
            del os.environ[_HIDING]
        else:
            os.environ[_HIDING] = hidden


def _guards() -> Any:
    folder = Path(torch.__path__[0]) / "lib"
    for library in (folder / name for name in _LIBRARIES):
        if library.is_file():
            try:
                return (ctypes.c_void_p * (_META + 1)).in_dll(
                    ctypes.CDLL(str(library)), _TABLE
                )
            except (OSError, ValueError) as error:
                raise RuntimeError(
                    f"torch {torch.__version__}: {library} has no table of device "
                    f"guards ({error})"
                ) from error
    raise RuntimeError(
        f"torch {torch.__version__}: no {' and no '.join(_LIBRARIES)} in {folder}; the "
        "virtual GPU runs on Linux and macOS"
    )
