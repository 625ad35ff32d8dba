"""Loading a checkpoint that another optimizer has written, as the flags say."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_muon.console import say
from megatron_muon.runtime.consensus import gathered, together
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.flags import flags_of_upstream

# Ways to read a checkpoint that is converted, and what is printed of them.
_CONVERSIONS = {
    "momentum": "AdamW's: Muon's momentum starts as exp_avg / (1 - β1)",
    "fresh": "AdamW's: Muon's momentum starts at zero",
    "megatron's": (
        "of Megatron's own Muon: its momentum, a mean, goes on as the sum M / (1 - μ); "
        "a second moment of the rule starts at zero"
    ),
    "muon's": "Muon's: Adam's moments of what Muon had start at zero",
}


@contextmanager
def from_other(
    args: Namespace, optimizer: Any, folder: Path | None, *, muon: bool
) -> Iterator[str]:
    """A context in which ``optimizer`` loads the checkpoint, converted if another
    optimizer wrote it.

    Every rank of the world calls it, with ``muon`` in a run of Muon's. It yields how
    the state is read: a key of ``_CONVERSIONS``, ``unconverted``, ``after muon``, or ""
    where none is.

    Raises:
        ValueError: the checkpoint is AdamW's and no flag says how to load it, or ranks
            see different files.
    """
    if optimizer is None or folder is None or args.finetune or args.no_load_optim:
        yield ""
        return
    from megatron_muon.mcore.checkpoint.interop import adamw_after_muon, switch
    from megatron_muon.mcore.checkpoint.interop.saved import Saved

    saved = together(lambda: Saved.of(folder))
    how = _agreed(lambda: _into_muon(args, saved) if muon else _into_adamw(saved))
    if how in _CONVERSIONS and dist.get_rank() == 0:
        theirs = _settings_of_megatrons(optimizer) if how == "megatron's" else ""
        say(f"[megatron_muon] {folder} is {_CONVERSIONS[how]}{theirs}")
    with ExitStack() as reading:
        if how == "muon's":
            settings = together(saved.settings)
            reading.enter_context(adamw_after_muon.reading_muon(optimizer, settings))
        elif how == "after muon":
            former = together(lambda: saved.settings(adamw_after_muon.YOUNG, "former"))
            adamw_after_muon.go_on_after_muon(optimizer, former)
        elif how == "megatron's":
            reading.enter_context(_metadata_of_whole_weights())
            reading.enter_context(switch.reading_megatron_muon(optimizer, folder))
        elif how != "unconverted":
            reading.enter_context(switch.reading_adamw(optimizer, how))
        yield how


def _settings_of_megatrons(optimizer: Any) -> str:
    """The flags to give where a run is to go on as Megatron's own Muon did, if this
    Megatron has one.
    """
    from megatron_muon.mcore.wiring.validate import own_muons_fields

    flags = flags_of_upstream(own_muons_fields(optimizer.config))
    said = f"; its other settings, if they were Megatron's defaults, are {flags}"
    return said if flags else ""


def _agreed(find: Callable[[], str]) -> Any:
    """How to read the checkpoint; equal on all ranks, since collectives depend on
    it.
    """
    every = sorted(set(gathered(find)))
    if len(every) > 1:
        raise ValueError(
            "ranks see different files: a checkpoint must be on a file system that all "
            "of them share (some would read it as "
            f"{', others as '.join(every)})"
        )
    return every[0]


def _into_muon(args: Namespace, saved: Any) -> str:
    """How a run with Muon reads the checkpoint: ``unconverted``, or a key of
    ``_CONVERSIONS``.
    """
    if saved.writer != "adamw":
        return "unconverted"
    if saved.is_megatrons:
        return "megatron's"
    how = str(args.muon_from_adamw)
    if how == "refuse":
        raise ValueError(
            f"{saved.folder} has AdamW's optimizer state: give --muon-from-adamw "
            "momentum (Muon's momentum starts as Adam's first moment, scaled) or "
            "--muon-from-adamw fresh (at zero), or load the model alone "
            "(--no-load-optim)"
        )
    return how


def _into_adamw(saved: Any) -> str:
    """How a run with AdamW reads it: ``unconverted``, ``muon's`` or ``after muon``."""
    from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import YOUNG

    if saved.writer == "muon":
        return "muon's"
    return "after muon" if saved.has(YOUNG) else "unconverted"


@contextmanager
def _metadata_of_whole_weights() -> Iterator[None]:
    """A context in which every checkpoint passes for one that can be resharded.

    Checkpoints of its own Muon lack this entry, since they have no distributed
    optimizer. Where TP or PP differ, or with --ckpt-fully-parallel-load, Megatron reads
    it and stops at a KeyError.
    """
    from megatron.core import dist_checkpointing

    from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS

    # core 0.13 and later
    original: Any = getattr(dist_checkpointing, "load_content_metadata", None)

    def load_content_metadata(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata = original(*args, **kwargs) or {}
        return {**metadata, "distrib_optim_sharding_type": WHOLE_WEIGHTS}

    with replaced(dist_checkpointing, load_content_metadata=load_content_metadata):
        yield
