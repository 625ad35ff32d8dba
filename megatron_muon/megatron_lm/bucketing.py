"""``--muon-dp-layout``: the layout of grad buffers that flags or a checkpoint set, or
leave to the plugin.

Where they leave it, it is chosen once the model is there
(``mcore.wiring.buffers.bucket_layout``). A run that goes on from a checkpoint keeps its
layout.
"""

from __future__ import annotations

import dataclasses
import importlib
from argparse import Namespace
from pathlib import Path

from megatron_muon.mcore.load_check import digest
from megatron_muon.settings.flags import written


def aligns_shards(args: Namespace) -> bool:
    """Whether a run orders the parameters within buckets so that shards cut few of
    them.

    It does not where it may load an AdamW checkpoint, since most formats keep
    Megatron's order.
    """
    from megatron_muon.mcore.wiring.buffers.bucket_layout import takes_layouts

    contiguous = (written(args, "muon_dp_layout") or "contiguous") == "contiguous"
    from_adamw = written(args, "muon_from_adamw") not in (None, "refuse")
    return contiguous and not from_adamw and takes_layouts()


def open_layouts(args: Namespace, *, may_be_bucketed: bool = False) -> tuple[str, ...]:
    """The layouts that are left to choose from; none where the number of buckets is
    set, too.

    A run may become bucketed only if later runs find that in its checkpoints' digest.
    """
    if args.muon_dp_layout == "bucketed" or not args.overlap_grad_reduce:
        return ()
    are_given = args.ddp_num_buckets is not None or args.ddp_bucket_size is not None
    if are_given or getattr(args, "overlap_param_gather_with_optimizer_step", False):
        return ()  # with the latter Megatron makes one bucket of each buffer
    return ("contiguous", "bucketed") if may_be_bucketed else ("contiguous",)


def take_bucketed(args: Namespace) -> None:
    """Give a run, and its checkpoints, Megatron's own buckets in Megatron's order."""
    args.muon_dp_layout = "bucketed"
    note(args.muon_dp_layout)
    core = importlib.import_module("megatron_muon.mcore.wiring.install")
    config = core.settings()
    if config is not None and config.align_shards:
        core.install(dataclasses.replace(config, align_shards=False))


def note(layout: str) -> None:
    """Have this run's checkpoints name its layout where it is not the default."""
    digest.beside.pop("layout", None)
    if layout == "bucketed":
        digest.beside["layout"] = layout


def saved_layout(folder: Path) -> str:
    """The layout that a checkpoint's digest names; that of earlier versions where it
    names none.
    """
    try:
        content = digest.read(folder) or {}
    except (digest.DigestError, OSError):  # the load says so
        content = {}
    return "bucketed" if content.get("layout") == "bucketed" else "contiguous"
