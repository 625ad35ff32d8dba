"""Loading a checkpoint that another optimizer has written, as the flags say."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.runtime.collectives import all_gather_texts
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import replaced

_SAID = {
    "momentum": "AdamW's: Muon's momentum starts as exp_avg / (1 - β1)",
    "fresh": "AdamW's: Muon's momentum starts at zero",
    "sum": "of the proof of concept of this work: its momentum goes on",
    "megatron's": "of Megatron's own Muon: its momentum, a mean, goes on as the sum M / (1 - μ)",
}


@contextmanager
def from_other(
    args: Namespace, optimizer: Any, folder: Path | None, *, muon: bool
) -> Iterator[None]:
    """Within it ``optimizer`` loads the checkpoint, converted if another optimizer wrote it.

    Every rank of the world calls it.

    Args:
        args: Megatron's arguments; ``muon_from_adamw``, ``no_muon_checkpoint_digest``, ``finetune``
            and ``no_load_optim`` are read.
        optimizer: the chain of optimizers, or None; nothing is done without it.
        folder: the checkpoint that Megatron will read, or None; nothing is done without it.
        muon: the run is Muon's, not AdamW's.

    Raises:
        ValueError: the checkpoint is AdamW's and no flag says how to load it, or ranks see
            different files.
    """
    if optimizer is None or folder is None or args.finetune or args.no_load_optim:
        yield
        return
    with ExitStack() as reading:
        device = _device(optimizer)
        how = _agreed(lambda: _into_muon(args, folder) if muon else _into_adamw(folder), device)
        if how == "muon's":
            from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import reading_muon
            from megatron_muon.mcore.checkpoint.interop.switch import record_of
            from megatron_muon.mcore.load_check.check import check_files

            if not getattr(args, "no_muon_checkpoint_digest", False):
                check_files(folder, device)
            _say(f"{folder} is Muon's: Adam's moments of what Muon had start at zero")
            settings = together(lambda: record_of(folder)["settings"], None, device)
            reading.enter_context(reading_muon(optimizer, settings))
        elif how == "after muon":
            from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import (
                YOUNG,
                go_on_after_muon,
            )
            from megatron_muon.mcore.checkpoint.interop.switch import record_of

            together(
                lambda: go_on_after_muon(optimizer, record_of(folder, YOUNG)["former"]),
                None,
                device,
            )
        elif how == "megatron's":
            from megatron_muon.mcore.checkpoint.interop.switch import reading_megatron_muon

            _say(f"{folder} is {_SAID[how]}")
            reading.enter_context(_metadata_of_whole_weights())
            reading.enter_context(reading_megatron_muon(optimizer, folder))
        elif how in _SAID:
            from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw

            _say(f"{folder} is {_SAID[how]}")
            reading.enter_context(reading_adamw(optimizer, how))
        yield


def _agreed(find: Callable[[], str], device: Any) -> Any:
    """How to read the checkpoint; equal on all ranks, since collectives depend on it."""
    how = together(find, None, device)
    every = set(all_gather_texts(how, None))
    if len(every) > 1:
        raise ValueError(
            "ranks see different files: a checkpoint must be on a file system that all of them "
            f"share (some would read it as {', others as '.join(sorted(every))})"
        )
    return how


def _into_muon(args: Namespace, folder: Path) -> str:
    """How a run with Muon reads the checkpoint: ``own`` (unconverted), or a key of ``_SAID``."""
    from megatron_muon.mcore.checkpoint.interop.foreign import refuse
    from megatron_muon.mcore.checkpoint.interop.switch import foreign_writer, writer_of

    if writer_of(folder) != "adamw":
        return "own"
    foreign = foreign_writer(folder)
    if foreign == "moonshot":
        return "sum"
    if foreign is not None:
        refuse(foreign)
        return "megatron's"
    how = args.muon_from_adamw
    if how == "refuse":
        raise ValueError(
            f"{folder} has AdamW's optimizer state: give --muon-from-adamw momentum (Muon's "
            "momentum starts as Adam's first moment, scaled) or --muon-from-adamw fresh (at zero), "
            "or load the model alone (--no-load-optim)"
        )
    return str(how)


@contextmanager
def _metadata_of_whole_weights() -> Iterator[None]:
    """Within it Megatron takes every checkpoint for one that can be resharded.

    Checkpoints of its own Muon lack this entry, since they have no distributed optimizer. Where TP
    or PP differ, or with --ckpt-fully-parallel-load, Megatron reads it and stops at a KeyError.
    """
    from megatron.core import dist_checkpointing

    from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS

    original = getattr(dist_checkpointing, "load_content_metadata", None)  # core 0.13 and later

    def load_content_metadata(*args: Any, **kwargs: Any) -> dict[str, Any]:
        assert original is not None
        metadata = original(*args, **kwargs) or {}
        return {**metadata, "distrib_optim_sharding_type": WHOLE_WEIGHTS}

    with replaced(dist_checkpointing, load_content_metadata=load_content_metadata):
        yield


def _into_adamw(folder: Path) -> str:
    from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import YOUNG
    from megatron_muon.mcore.checkpoint.interop.switch import has_record, writer_of

    if writer_of(folder) == "muon":
        return "muon's"
    return "after muon" if has_record(folder, YOUNG) else "own"


def _device(optimizer: Any) -> Any:
    from megatron_muon.mcore.wiring.buffers.shards import device_of

    return device_of(optimizer.chained_optimizers[0].model_chunks)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        say(f"[megatron_muon] {line}")
