"""All launches of our kernels compile, to the cubin, with the triton of every supported
torch.

No GPU is needed. Each triton comes from the package index, about 200 MB. The oldest one
stays in the tests' environment; the others are deleted afterwards.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from support import ROOT, TESTS
from support.processes import printed

TRITONS = "3.0.0 3.1.0 3.2.0 3.3.1 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0 3.9.0".split()
OLDEST = TRITONS[0]  # torch 2.4's
KERNELS = "momentum_kernel symmetric_kernel update_kernel"


def _run(command: str, **environment: str) -> str:
    """What ``python -m command`` prints."""
    return printed("-m", *command.split(), timeout=500, **environment)


def _compile(version: str, folder: Path, *capabilities: str) -> None:
    """Compile with a triton in a folder, which is installed there if it is not yet."""
    if version < "3.2" and sys.version_info >= (3, 13):
        pytest.skip(f"triton {version} has no wheel for this Python, nor has its torch")
    mark = folder / ".installed"
    if not mark.exists():
        _run(
            f"pip install --quiet --no-deps --upgrade --target {folder} "
            f"triton=={version}"
        )
        mark.touch()
    path = os.pathsep.join(map(str, (folder, TESTS, ROOT)))
    module = f"support.kernels.compiling {' '.join(capabilities)}"
    with tempfile.TemporaryDirectory() as cache:
        said = _run(module, PYTHONPATH=path, TRITON_CACHE_DIR=cache)
    made = re.findall(rf"^triton {version} sm_(\d+): 26 launches of (.+)$", said, re.M)
    assert made == [(capability, KERNELS) for capability in capabilities]


def test_every_launch_compiles_with_the_oldest_triton() -> None:
    _compile(OLDEST, Path(sys.prefix) / "triton" / OLDEST, "90")


@pytest.mark.slow
@pytest.mark.parametrize("version", TRITONS)
def test_every_launch_compiles(version: str) -> None:
    newer = ("100",) if version >= "3.3" else ()  # its ptxas knows it
    with tempfile.TemporaryDirectory() as folder:
        _compile(version, Path(folder), "80", "90", *newer)
