"""``--muon-dp-layout``: what flags say of the grad buffers, or leave to the plugin.

Where they leave the number of buckets, it is chosen once the model is there
(``mcore.wiring.buffers.bucket_layout``).
"""

from __future__ import annotations

from argparse import Namespace

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


def leaves_buckets(args: Namespace) -> bool:
    """Whether flags leave the number of buckets to the plugin."""
    if args.muon_dp_layout == "bucketed" or not args.overlap_grad_reduce:
        return False
    if args.ddp_num_buckets is not None or args.ddp_bucket_size is not None:
        return False
    # with this Megatron makes one bucket of each buffer
    return not getattr(args, "overlap_param_gather_with_optimizer_step", False)
