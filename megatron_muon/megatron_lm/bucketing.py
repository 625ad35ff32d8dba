"""``--muon-dp-layout``: what flags say of the grad buffers, or leave to the plugin.

Where they leave the number of buckets, it is chosen once the model is there
(``mcore.wiring.buffers.bucket_layout``).
"""

from __future__ import annotations

from argparse import Namespace


def leaves_buckets(args: Namespace) -> bool:
    """Whether flags leave the number of buckets to the plugin."""
    if args.muon_dp_layout == "bucketed" or not args.overlap_grad_reduce:
        return False
    if args.ddp_num_buckets is not None or args.ddp_bucket_size is not None:
        return False
    # with this Megatron makes one bucket of each buffer
    return not getattr(args, "overlap_param_gather_with_optimizer_step", False)
