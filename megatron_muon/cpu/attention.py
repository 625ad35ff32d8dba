"""The parts of attention that Megatron's plain-torch attention leaves to Transformer
Engine.

Context parallelism, and the head sizes of multi-latent attention.
"""

import copy
import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_muon.runtime.patches import Function, Patches

_ATTENTION = "megatron.core.transformer.dot_product_attention"


def chunks(cp_size: int, cp_rank: int) -> tuple[int, int]:
    """The two of 2 × ``cp_size`` chunks of the sequence on a rank: an early one and a
    late one.

    Source: ``get_batch_on_this_cp_rank``; causal attention is then about equal work on
    each rank.
    """
    return cp_rank, 2 * cp_size - 1 - cp_rank


def positions(sequence: int, cp_size: int, cp_rank: int) -> Tensor:
    """int64 [sequence / cp_size]: where in the whole sequence a rank's tokens are."""
    if sequence % (2 * cp_size):
        raise ValueError(
            f"a sequence of {sequence} tokens over {cp_size} context-parallel ranks: "
            f"use a multiple of {2 * cp_size}"
        )
    size = sequence // (2 * cp_size)
    return torch.cat(
        [torch.arange(c * size, (c + 1) * size) for c in chunks(cp_size, cp_rank)]
    )


def whole_sequence(tensor: Tensor, group: Any) -> Tensor:
    """All ranks' parts of ``tensor`` [sequence / cp, ...], in the order of the
    sequence.

    The gradient is summed over the ranks and each gets its part.
    """
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gathered: Tensor = mappings.gather_from_sequence_parallel_region(
        tensor, group=group
    )
    size = group.size()
    parts = [positions(gathered.shape[0], size, rank) for rank in range(size)]
    return gathered.index_select(0, torch.cat(parts).argsort())


def _group(attention: Any) -> Any:
    group = getattr(attention.megatron_muon_groups, "cp", None)
    if group is None:
        state = importlib.import_module("megatron.core.parallel_state")
        group = state.get_context_parallel_group()
    return group


def _mask(attention: Any, mask: Tensor | None, sequence: int, group: Any) -> Any:
    """The mask for this rank's queries, from the caller's; None for no mask."""
    cp_size = group.size()
    if mask is None:
        if attention.attn_mask_type.name != "causal":
            return None
        queries = positions(sequence, cp_size, group.rank())
        # a key after the query
        return (torch.arange(sequence) > queries[:, None])[None, None]
    rows, columns = mask.shape[-2:]
    if columns == sequence and rows in (1, sequence // cp_size):
        return mask  # as get_batch_on_this_cp_rank cuts it
    if columns == sequence and rows == sequence:
        return mask[..., positions(sequence, cp_size, group.rank()), :]
    raise ValueError(
        f"attention_mask {tuple(mask.shape)} for a sequence of {sequence} tokens over "
        f"{cp_size} context-parallel ranks: give None, [.., {sequence // cp_size}, "
        f"{sequence}] from get_batch_on_this_cp_rank, or the whole [.., {sequence}, "
        f"{sequence}]"
    )


def _refuse(attention: Any, query: Tensor, key: Tensor) -> None:
    # since core 0.15
    window = getattr(attention.scale_mask_softmax, "window_size", None)
    if window is not None:
        raise NotImplementedError(
            f"window_size={window} with context parallelism is not in the CPU "
            "attention; use context_parallel_size=1"
        )
    if query.shape[0] != key.shape[0]:
        raise NotImplementedError(
            f"{query.shape[0]} queries and {key.shape[0]} keys on a rank: the CPU "
            "attention has context parallelism for self-attention only; use "
            "context_parallel_size=1"
        )


def multi_latent(patches: Patches) -> None:
    """Values may have another size per head than queries and keys: the output then has
    theirs.

    Only Transformer Engine's constructor takes the sizes that
    multi_latent_attention.py:155 hands it. Line 185 asks isinstance of a mock, as
    HAVE_TE is True there without Transformer Engine.
    """
    latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if hasattr(latent, "HAVE_TE"):  # since core 0.14
        extensions = importlib.import_module(
            "megatron.core.extensions.transformer_engine"
        )
        patches.set(latent, "HAVE_TE", extensions.HAVE_TE)

    def with_sizes(
        init: Function,
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        init(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = (
                v_channels * self.num_attention_heads_per_partition
            )

    patches.wrap(_ATTENTION, "DotProductAttention.__init__", with_sizes)


def context_parallel(patches: Patches) -> None:
    """Each rank's queries attend to the keys and values of all ranks, gathered before
    the product.

    Megatron leaves that to Transformer Engine (dot_product_attention.py:58), which
    passes them around. The result is the same but for rounding; keys and values take
    the memory of the whole.
    """

    def alone(
        init: Function, self: Any, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        without = copy.copy(config) if config.context_parallel_size > 1 else config
        without.context_parallel_size = 1
        init(self, without, *args, **kwargs)
        self.config = config
        # the argument's first name is that of core 0.13 and 0.14; 0.12 has none
        self.megatron_muon_groups = kwargs.get(
            "model_comm_pgs", kwargs.get("pg_collection")
        )

    def over_whole_sequence(
        forward: Function,
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self.config.context_parallel_size > 1:
            _refuse(self, query, key)
            group = _group(self)
            key = whole_sequence(key, group)
            value = whole_sequence(value, group)
            attention_mask = _mask(self, attention_mask, key.shape[0], group)
        return forward(self, query, key, value, attention_mask, *args, **kwargs)

    patches.wrap(_ATTENTION, "DotProductAttention.__init__", alone)
    patches.wrap(_ATTENTION, "DotProductAttention.forward", over_whole_sequence)
