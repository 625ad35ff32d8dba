"""Flags for a checkpoint that the other optimizer has written: what a run does before it loads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.agreement import raise_together

_SAID = {
    "momentum": "AdamW's: Muon's momentum starts as exp_avg / (1 - β1)",
    "fresh": "AdamW's: Muon's momentum starts at zero",
    "sum": "of the proof of concept of this work: its momentum goes on",
}


@contextmanager
def from_other(
    args: Namespace, optimizer: Any, folder: Path | None, *, muon: bool
) -> Iterator[None]:
    """Within it ``optimizer`` loads the checkpoint, if need be as the other optimizer's.

    Every rank of the world calls it.

    Args:
        args: Megatron's; ``muon_from_adamw`` and ``adamw_from_muon`` are read.
        optimizer: the chain; nothing is done where it is None, or its state is not to be loaded.
        folder: that Megatron will read; None for none.
        muon: the run is Muon's, not AdamW's.

    Raises:
        ValueError: the checkpoint is the other optimizer's, and no flag says what is to be done.
    """
    if optimizer is None or folder is None or args.finetune or args.no_load_optim:
        yield
        return
    with ExitStack() as reading:
        error: Exception | None = None
        try:
            how: Any = _into_muon(args, folder) if muon else _into_adamw(folder)
        except (OSError, ValueError) as own:
            error = own
        device = _device(optimizer)
        raise_together(error, None, device)
        if how == "muon's":
            from megatron_muon.mcore.adamw_after_muon import reading_muon
            from megatron_muon.mcore.checkpoint_switch import record_of

            _say(f"{folder} is Muon's: Adam's moments of what Muon had start at zero")
            reading.enter_context(reading_muon(optimizer, record_of(folder)["settings"]))
        elif how == "after muon":
            from megatron_muon.mcore.adamw_after_muon import YOUNG, go_on_after_muon
            from megatron_muon.mcore.checkpoint_switch import record_of

            go_on_after_muon(optimizer, record_of(folder, YOUNG)["former"])
        elif how in _SAID:
            from megatron_muon.mcore.checkpoint_switch import reading_adamw

            _say(f"{folder} is {_SAID[how]}")
            reading.enter_context(reading_adamw(optimizer, how))
        yield


def _into_muon(args: Namespace, folder: Path) -> str:
    """``own``, or how one in AdamW's layout is read."""
    from megatron_muon.mcore.checkpoint_switch import foreign_writer, writer_of

    if writer_of(folder) != "adamw":
        return "own"
    foreign = foreign_writer(folder)
    if foreign == "moonshot":
        return "sum"
    if foreign is not None:
        raise ValueError(
            f"{folder} is a checkpoint of Megatron's own Muon, whose momentum this megatron_muon "
            "does not read yet: load the model alone (--no-load-optim)"
        )
    how = args.muon_from_adamw
    if how == "refuse":
        raise ValueError(
            f"{folder} has AdamW's optimizer state: give --muon-from-adamw momentum (Muon's "
            "momentum starts as Adam's first moment, scaled) or --muon-from-adamw fresh (at zero), "
            "or load the model alone (--no-load-optim)"
        )
    return str(how)


def _into_adamw(folder: Path) -> str:
    from megatron_muon.mcore.adamw_after_muon import YOUNG
    from megatron_muon.mcore.checkpoint_switch import has_record, writer_of

    if writer_of(folder) == "muon":
        return "muon's"
    return "after muon" if has_record(folder, YOUNG) else "own"


def _device(optimizer: Any) -> Any:
    from megatron_muon.mcore.shards import device_of

    return device_of(optimizer.chained_optimizers[0].model_chunks)


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(f"[megatron_muon] {line}", flush=True)
