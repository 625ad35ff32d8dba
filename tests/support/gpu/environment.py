"""The environment that a result depends on: versions, device and settings, by name."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings

import torch

from megatron_muon.version import __version__
from support.gpu.settings import Settings

# Packages whose versions the report names, if they are installed.
_PACKAGES = """
    transformer-engine apex emerging-optimizers dion gram-newton-schulz quack-kernels
    triton numpy nvidia-nccl-cu12
""".split()


def described(settings: Settings) -> dict[str, str]:
    """The environment in words, for the report; no name of a machine, a user or a
    path.
    """
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    return {
        "megatron_muon": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "megatron-core": _core(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl(),
        "driver": _driver(),
        "device": device_name(settings),
        "ranks": str(settings.ranks),
        **{f"package {name}": version for name, version in versions.items()},
    }


def device_name(settings: Settings) -> str:
    """The GPUs by name and number; the kind of CPU without one."""
    if settings.device == "cpu":
        return f"CPU {platform.machine()}"
    names = [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} x {name}" for name in kinds)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _core() -> str:
    """The version of megatron.core, which may be a checkout's that pip has not
    installed.
    """
    from megatron_muon.mcore.seams.rows import megatron_version

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return megatron_version()[0]


def _nccl() -> str:
    return (
        ".".join(map(str, torch.cuda.nccl.version()))
        if torch.cuda.is_available()
        else "none"
    )


def _driver() -> str:
    """The driver's version, from the file in which Linux has it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            return file.readline().strip() or "unknown"
    except OSError:
        return "none"
