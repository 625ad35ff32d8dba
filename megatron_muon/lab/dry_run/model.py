"""A run: its flags, and the division of its ranks and the sizes of its GPT, as
Megatron-LM derives them.

Sources: ``validate_args`` of megatron/training/arguments.py, and
``_vocab_size_with_padding`` of megatron/training/tokenizer/tokenizer.py.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass
from typing import Literal

from megatron_muon.settings.config import MuonConfig

_ORDER, _ORDER_PP_INSIDE = "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks of a run are divided; ``initialize_model_parallel``'s arguments."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int
    chunks: int | None
    instances: int
    order: str


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as its command line asks for it.

    Only ``dry_run`` reads the flags, to build the model; ``plan`` and ``routes`` take
    what they need from the other fields and the properties.
    """

    flags: Namespace  # Megatron's arguments, with the buckets that the run would choose
    config: MuonConfig  # Muon's settings
    ranks: Ranks  # how its ranks are divided
    leaves_buckets: bool = False  # see ``Host.leaves_buckets``
    notes: tuple[str, ...] = ()  # lines to print about the buckets and other flags

    @property
    def layout(self) -> Literal["contiguous", "bucketed"]:
        """The layout of its grad buffers."""
        return "bucketed" if self.flags.muon_dp_layout == "bucketed" else "contiguous"

    @property
    def buckets(self) -> int | None:
        """The number of buckets that flags or the plugin choose; None: Megatron's."""
        number: int | None = self.flags.ddp_num_buckets
        return number

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sequence; None where no flag says it."""
        length: int = self.flags.seq_length or self.flags.max_position_embeddings or 0
        return length or None

    @property
    def global_batch_size(self) -> int | None:
        """Sequences of a step; None where no flag says it."""
        size: int | None = self.flags.global_batch_size
        return size

    @property
    def attention_width(self) -> int:
        """Layers x heads x head size: what attention's flops are proportional to."""
        heads = self.flags.num_attention_heads
        size = self.flags.kv_channels or self.flags.hidden_size // heads
        return int(self.flags.num_layers * heads * size)


def ranks_of(flags: Namespace) -> Ranks:
    """The division of the ranks, of the smallest world if none is given; a ValueError
    if uneven.
    """
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    cp, ep = flags.context_parallel_size, flags.expert_model_parallel_size
    expert_tp = flags.expert_tensor_parallel_size or tp
    instances = flags.num_distributed_optimizer_instances
    dense, experts = tp * cp * pp, expert_tp * ep * pp
    world = math.lcm(dense, experts) if flags.world_size is None else flags.world_size
    for what, size, shards in (
        ("TP x CP x PP", dense, world // (tp * pp)),
        ("expert-TP x EP x PP", experts, world // experts),
    ):
        if world < 1 or world % size:
            raise ValueError(
                f"--world-size {world} is not a multiple of {what} = {size}"
            )
        if shards % instances:
            raise ValueError(
                f"--num-distributed-optimizer-instances {instances} does not divide "
                f"the {shards} shards of a buffer on {world} ranks with {what} = {size}"
            )
    order = _ORDER_PP_INSIDE if flags.use_tp_pp_dp_mapping else _ORDER
    return Ranks(world, tp, pp, cp, ep, expert_tp, _chunks(flags), instances, order)


def padded_vocab(flags: Namespace) -> int:
    """Rows of the embedding over all TP ranks; a ValueError if no size is given."""
    if flags.padded_vocab_size is not None:
        return int(flags.padded_vocab_size)
    _require(flags, "vocab_size")
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return int(math.ceil(flags.vocab_size / multiple) * multiple)


def _require(flags: Namespace, *names: str) -> None:
    missing = [
        f"--{name.replace('_', '-')}" for name in names if not getattr(flags, name)
    ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} needed: give the run's script and its arguments, a "
            "preset by --model, or a GPT's sizes"
        )


def model_sizes(flags: Namespace) -> dict[str, int | None]:
    """Sizes that Megatron-LM derives where they are not given."""
    _require(flags, "num_layers", "hidden_size", "num_attention_heads")
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    if flags.kv_channels is None and hidden % heads:
        raise ValueError(f"--hidden-size {hidden} is not a multiple of {heads} heads")
    wide = int((4 * hidden * 2 / 3) / 64) * 64 if flags.swiglu else 4 * hidden
    ffn = flags.ffn_hidden_size or wide
    experts_ffn = (flags.moe_ffn_hidden_size or ffn) if flags.num_experts else None
    return {
        "kv_channels": flags.kv_channels or hidden // heads,
        "ffn_hidden_size": ffn,
        "moe_ffn_hidden_size": experts_ffn,
    }


def _chunks(flags: Namespace) -> int | None:
    """Model chunks of a rank, None for one."""
    # Megatron-LM has validated them
    if hasattr(flags, "virtual_pipeline_model_parallel_size"):
        return flags.virtual_pipeline_model_parallel_size or None
    count = flags.num_virtual_stages_per_pipeline_rank
    return None if count == 1 else count
