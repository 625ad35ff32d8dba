"""Torch's internals that this package uses, and symbols from packages of kernels.

The rows are names of torch that a release may change without notice, and functions that a command
replaces. ``kernels`` rows are checked where their package is installed.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import Part, Seam, Use


def _torch(module: str, name: str, use: Use, relied_on: str, part: Part = "torch") -> Seam:
    return Seam(module, name, use, relied_on, part=part)


_FOREACH = "one kernel for a list of tensors"
SEAMS = (
    *(
        _torch("torch", f"_foreach_{name}", "called", _FOREACH)
        for name in ("add_", "copy_", "mul", "mul_", "norm", "sub_")
    ),
    _torch(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "called",
        "the world's store, where the first rank to compare settings leaves whether it asks",
    ),
    _torch("torch._C", "PyTorchFileReader", "called", "reads the archives that torch.save writes"),
    # --- without a GPU
    _torch(
        "torch.utils._device",
        "_device_constructors.cache_clear",
        "called",
        "forgets the functions that a device context acts on, which torch looks up once",
        "cpu",
    ),
    _torch("torch._dynamo", "config.disable", "replaced", "uncompiles what is compiled", "cpu"),
    # --- commands
    _torch(
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "called",
        "process groups that do nothing",
        "dry_run",
    ),
    _torch("torch.cuda", "current_device", "replaced", "the meta device", "dry_run"),
    _torch(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "subclassed",
        "sees every kernel of a step",
        "bench",
    ),
    _torch(
        "torch.cuda._sanitizer",
        "enable_cuda_sanitizer",
        "called",
        "raises an error where streams race, from then on",
        "bench",
    ),
    _torch("torch.cuda._sanitizer", "CUDASanitizerErrors", "read", "that error", "bench"),
    _torch(
        "torch.autograd",
        "_profiler_enabled",
        "called",
        "whether a profiler of torch is on already",
        "traces",
    ),
    # --- kernels
    _torch(
        "quack.gemm_interface",
        "gemm_symmetric",
        "called",
        "the symmetric products of Newton-Schulz; tried before the first step",
        "kernels",
    ),
)
# Attributes of Apex's Adam, which cannot be imported without a GPU: the object itself is asked.
APEX = {"param_groups_master": "a list beside the groups, which must be as long as they are"}
