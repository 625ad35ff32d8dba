"""A run whose attention logits are clipped after each step, by given largest logits.

``clipped`` runs on every rank of a topology with the plugin's clip, and
``clipped_whole`` on one process, with Megatron's own clip of whole weights or one that
is written here from the paper. Their results are to be the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from support.installed import installed
from support.models.gpt import Built, held, start, take_step
from support.runs.cases import Case, Topology

BELOW = 0.25  # of the largest logit, on all data-parallel ranks but one


def largest_logits(case: Case, layer: int, step: int) -> Tensor:
    """(heads,) in fp32: some above 100, one far above, the others below."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((layer, step)).encode()))
    return 20.0 + 400.0 * torch.rand(case.heads, generator=generator) ** 2


def attentions(built: Built) -> Iterator[Any]:
    """Megatron's self-attentions on this rank, in the model's order."""
    from megatron.core.transformer.attention import Attention

    for chunk in built.chunks:
        yield from (
            module for module in chunk.modules() if isinstance(module, Attention)
        )


def set_logits(built: Built, step: int, dtype: torch.dtype) -> float:
    """Give each attention what its forward passes would have found; returns the largest
    of all.
    """
    from megatron.core import parallel_state as ps

    ranks = ps.get_data_parallel_world_size(with_context_parallel=True)
    rank = ps.get_data_parallel_rank(with_context_parallel=True)
    case, tp = built.case, built.topology.tp
    largest = 0.0
    for attention in attentions(built):
        whole = largest_logits(case, attention.layer_number, step).to(dtype)
        largest = max(largest, whole.max().item())
        # each head's largest is on one rank
        here = torch.arange(case.heads) % ranks == rank
        mine = torch.where(here, whole, BELOW * whole).chunk(tp)[built.tp_rank]
        attention.core_attention.current_max_attn_logits = mine.clone()
    return largest


def clipped(
    case: Case, topology: Topology, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What this rank holds after the case's steps, each with a clip.

    With Megatron's ``qk_clip`` its training loop calls ``clip_qk`` after a step; with
    the plugin's the step itself clips.
    """
    with installed(case.settings):
        built = start(case, topology)
        for step in range(case.steps):
            largest = set_logits(built, step, dtype)
            take_step(
                built,
                step,
                partial(_loops_clip, built, largest) if case.qk_clip else _no,
            )
            assert all(
                a.core_attention.current_max_attn_logits is None
                for a in attentions(built)
            )
        return held(built)


def _no() -> None:
    pass


def _loops_clip(built: Built, largest: float) -> None:
    from megatron.core.optimizer import qk_clip

    assert qk_clip.clip_qk(built.chunks) == largest


def clipped_whole(
    case: Case, dtype: torch.dtype = torch.float32, by_hand: bool = False
) -> dict[str, Any]:
    """The same on one process, where whole weights are clipped."""
    settings = tuple(pair for pair in case.muon if not pair[0].startswith("qk_clip"))
    built = start(replace(case, muon=settings), Topology(), plugin=True)
    clip_one = _clip_by_hand if by_hand else _clip_by_megatron

    def clip() -> None:
        for attention in attentions(built):
            clip_one(attention)

    for step in range(case.steps):
        set_logits(built, step, dtype)
        take_step(built, step, clip)
    return held(built)


def _clip_by_megatron(attention: Any) -> None:
    """Megatron's own for the weights, and its arithmetic for the biases, which it
    leaves.
    """
    params = [param for param in attention.parameters() if hasattr(param, "main_param")]
    flat = [param.main_param for param in params]
    for param, main in zip(params, flat, strict=True):
        param.main_param = main.view(param.shape)
    largest = attention.core_attention.current_max_attn_logits
    try:
        attention.clip_qk()
        if largest.max() > attention.config.qk_clip_threshold:
            for linear, clip in _megatrons_clips(attention):
                for bias in _copies(linear.bias):
                    clip(bias.view(-1, 1))
    finally:
        for param, main in zip(params, flat, strict=True):
            param.main_param = main


def _megatrons_clips(attention: Any) -> list[tuple[Any, Any]]:
    """Each projection, and what clips a weight of its in place."""
    if not hasattr(attention, "linear_kv_up_proj"):
        return [(attention.linear_qkv, attention._clip_linear_qkv)]
    return [
        (attention.linear_q_up_proj, attention._clip_q_proj_weight),
        (attention.linear_kv_up_proj, attention._clip_kv_proj_weight),
    ]


@torch.no_grad()
def _clip_by_hand(attention: Any) -> None:
    """Kimi K2's clip at 100 with alpha 0.5, written from the paper, head by head."""
    config, core = attention.config, attention.core_attention
    if hasattr(attention, "linear_kv_up_proj"):
        _clip_latent(attention)
        return
    groups, size = config.num_query_groups, config.kv_channels
    heads = config.num_attention_heads // groups
    parts = [
        heads,
        heads if getattr(config, "attention_output_gate", False) else 0,
        1,
        1,
    ]
    for weight in _copies_in(attention.linear_qkv):
        whole = weight.view(groups, sum(parts) * size, -1)  # a bias has one column
        for group in range(groups):
            largest = core.current_max_attn_logits[
                group * heads : (group + 1) * heads
            ].max()
            if largest <= 100:
                continue
            queries, _, keys, _ = whole[group].split([part * size for part in parts])
            root = (100 / largest).sqrt().view(1)
            queries.mul_(root)
            keys.mul_(root)


def _clip_latent(attention: Any) -> None:
    config, logits = attention.config, attention.core_attention.current_max_attn_logits
    head, rotary, value = (
        config.qk_head_dim,
        config.qk_pos_emb_head_dim,
        config.v_head_dim,
    )
    for number, largest in enumerate(logits):
        if largest <= 100:
            continue
        eta = (100 / largest).view(1)
        for weight in _copies_in(attention.linear_q_up_proj):
            own = weight.view(len(logits), head + rotary, -1)[number]
            own[:head].mul_(eta.sqrt())
            own[head:].mul_(eta)
        for weight in _copies_in(attention.linear_kv_up_proj):
            weight.view(len(logits), head + value, -1)[number, :head].mul_(eta.sqrt())


def _copies_in(linear: Any) -> list[Tensor]:
    """Those of its weight and of its bias, if it has one."""
    return _copies(linear.weight) + _copies(linear.bias)


def _copies(param: Any) -> list[Tensor]:
    """The parameter, if it is one, and its main parameter where that is apart."""
    if not isinstance(param, torch.nn.Parameter):
        return []  # no bias: None, or an empty tensor of Transformer Engine's
    main = getattr(param, "main_param", None)
    return [param.data, *([] if main is None else [main.data.view(param.shape)])]
