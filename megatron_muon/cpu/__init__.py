"""Run megatron-core without a GPU: real gloo collectives, CPU tensors, Megatron's GPU
code paths.

Call ``enable()`` before anything imports Megatron, then use Megatron as on a GPU with
the process group made by ``torch.distributed.init_process_group("gloo", ...)``. The
functions of ``REPLACEMENTS`` say what they replace and why; ``disable()`` puts all of
it back.

Covered, with the local layer specs: data, tensor (with and without sequence
parallelism), pipeline (also virtual), context and expert parallelism, expert tensor
parallelism, several optimizer instances, and every overlap; mixtures of experts with
SequentialMLP and the legacy GroupedMLP (bf16, as it asks), shared experts, the
allgather and alltoall dispatchers; multi-latent attention, multi-token prediction, full
recompute; fp32, bf16, and fp16 with the dynamic loss scale. Not covered: Transformer
Engine's own layers, sliding windows or cross-attention with context parallelism, packed
sequences, fused kernels, CUDA graphs, fp8.
"""

import importlib
import sys
import warnings

import torch

from megatron_muon.cpu import spawned, torch_cuda
from megatron_muon.cpu.fused_adam import FusedAdam
from megatron_muon.cpu.table import BEFORE_MEGATRON, REPLACEMENTS, Replacement
from megatron_muon.presence import require_core
from megatron_muon.runtime.patches import Patches

__all__ = ["REPLACEMENTS", "FusedAdam", "Replacement", "disable", "enable", "enabled"]

_patches = Patches(by="megatron_muon.cpu")
_IMPORTED_LATER = (
    "megatron.core.optimizer",
    "megatron.core.transformer.torch_norm",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.moe.token_dispatcher",
)
_KNOWN_FALLBACKS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
)


def enabled() -> bool:
    """Whether the replacements are in place."""
    return _patches.is_on()


def enable(*, allow_cuda: bool = False, late: bool = False) -> None:
    """Put the replacements in place and import megatron-core's optimizer; twice is
    once.

    Args:
        allow_cuda: go ahead although this machine has a GPU, which is then not used.
        late: ``megatron.core`` may be imported already, but nothing has been built
            with it yet. Functions that it has passed to ``torch.compile`` run
            uncompiled, as everything else does.

    Raises:
        RuntimeError: ``megatron.core`` is already imported, has bound what would be
            replaced, and ``late`` is not set. Or a GPU is available and ``allow_cuda``
            is not set.
        CoreNotFoundError: there is no megatron.core.
        SeamError: its version is not supported.
    """
    if enabled():
        return
    require_core()
    if "megatron.core" in sys.modules and not late:
        raise RuntimeError(
            "megatron.core is already imported: call megatron_muon.cpu.enable() before "
            "anything imports Megatron (megatron_muon.install() does, too)"
        )
    if not allow_cuda and torch.cuda.is_available():
        raise RuntimeError(
            "this machine has a GPU; pass enable(allow_cuda=True) to run Megatron on "
            "the CPU anyway"
        )
    spawned.turn_off()
    try:
        if late:
            torch_cuda.compiled_before(_patches)
        _apply()
    except BaseException:
        _patches.undo()
        raise


def disable() -> None:
    """Put everything back, in torch and in the Megatron modules; without ``enable()`` a
    no-op.

    Functions that Megatron decorated with ``torch.compile`` while enabled stay eager,
    and ``enable()`` cannot be called again in a process that has imported Megatron.
    """
    _patches.undo()


def _apply() -> None:
    for replace in BEFORE_MEGATRON:
        replace(_patches)
    # Without a GPU nobody can follow this advice. It is silenced for the process: it
    # may be given again after ``disable``.
    for message in _KNOWN_FALLBACKS:
        warnings.filterwarnings("ignore", message=message)
    for name in _IMPORTED_LATER:
        importlib.import_module(name)
    for replace in REPLACEMENTS:
        if replace not in BEFORE_MEGATRON:
            replace(_patches)
