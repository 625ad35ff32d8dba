"""Warnings about AdamW's state that Megatron saves shifted, in runs without Muon."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_muon.console import say

# Whether this run's first step has warned, or found nothing to warn of.
_looked = False


def warn_at_start(args: Namespace, optimizer: Any) -> None:
    """Warn before the first step if saves of this run will be shifted. Every rank calls it."""
    global _looked
    if not _looked:
        _looked = True
        warn_of_save(args, optimizer)


def forget() -> None:
    """Forget that a run has started; for ``uninstall``."""
    global _looked
    _looked = False


def warn_of_save(args: Namespace, optimizer: Any) -> None:
    """Warn on rank 0 if any rank's state will be saved shifted. Every rank calls it.

    Args:
        args: Megatron's arguments of a run without Muon.
        optimizer: the run's, or None.
    """
    from megatron_muon.mcore.checkpoint.shifted import FAULT, will_shift
    from megatron_muon.mcore.seams.rows import megatron_version

    whole = getattr(args, "dist_ckpt_optim_fully_reshardable", False)  # since core 0.15
    if not (whole and args.save) or getattr(args, "no_save_optim", None):
        return
    version = megatron_version()[1]
    _warn(
        any(will_shift(part, version) for part in _parts(args, optimizer)),
        f"WARNING: {FAULT}, and so will this run of AdamW: a resume from its checkpoints goes "
        "wrong. Leave out --dist-ckpt-optim-fully-reshardable, or take one bucket "
        "(--ddp-num-buckets 1)",
    )


def warn_of_loaded(args: Namespace, optimizer: Any) -> None:
    """Warn on rank 0 if main parameters were loaded shifted on any rank. Every rank calls it.

    An fp32 weight is its own main parameter, so that nothing tells.
    """
    from megatron_muon.mcore.checkpoint.shifted import FAULT
    from megatron_muon.mcore.seams.rows import megatron_version

    if optimizer is None or args.finetune or args.no_load_optim or megatron_version()[1] < (0, 15):
        return
    _warn(
        any(map(_has_strange, _parts(args, optimizer))),
        "WARNING: the main parameters that were loaded are not those of the model's weights. "
        f"{FAULT}: such a checkpoint has lost it. Load the model alone (--no-load-optim)",
    )


def _warn(found: bool, line: str) -> None:
    from megatron_muon.mcore.wiring.buffers.shards import device_of
    from megatron_muon.runtime.collectives import all_gather_numbers

    every = all_gather_numbers([found], None, device_of([]))
    if dist.get_rank() == 0 and any(flag for (flag,) in every):
        say(f"[megatron_muon] {line}")


def _parts(args: Namespace, optimizer: Any) -> Iterator[Any]:
    """The DistributedOptimizers that have fp32 main parameters of their own on this rank."""
    if not args.use_distributed_optimizer:
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "buffers") and not getattr(part, "is_stub_optimizer", False):
            yield part


def _has_strange(part: Any) -> bool:
    from megatron.core.fp8_utils import is_float8tensor

    from megatron_muon.mcore.checkpoint.shifted import is_elsewheres
    from megatron_muon.mcore.wiring.buffers.shards import owned_shards

    config = part.config
    if config.use_precision_aware_optimizer or config.optimizer_cpu_offload:
        return False  # the shards are elsewhere
    for param, shard in owned_shards(part):
        here = part._get_model_param_range_map(param)["param"]
        if is_float8tensor(param):
            continue
        if is_elsewheres(shard, param.detach().view(-1)[here.start : here.end]):
            return True
    return False
