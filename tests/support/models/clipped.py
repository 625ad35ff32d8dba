"""A run whose attention logits are clipped after each step, by given largest logits.

``clipped`` runs on every rank of a topology with the plugin's clip, and ``clipped_whole`` on one
process with Megatron's own clip of whole weights: their results are to be the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from support.cases import Case, Topology
from support.models.gpt import Built, build, held, make_optimizer, take_step

Tensor = torch.Tensor
BELOW = 0.25  # of the largest logit, on all data-parallel ranks but one


def largest_logits(case: Case, layer: int, step: int) -> Tensor:
    """(heads,) in fp32: some above 100, one far above, the others below."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((layer, step)).encode()))
    return 20.0 + 400.0 * torch.rand(case.heads, generator=generator) ** 2


def attentions(built: Built) -> Iterator[Any]:
    """Megatron's self-attentions on this rank, in the model's order."""
    from megatron.core.transformer.attention import Attention

    for chunk in built.chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Attention))


def set_logits(built: Built, step: int, dtype: torch.dtype) -> float:
    """Give each attention what its forward passes would have found; returns the largest of all."""
    from megatron.core import parallel_state as ps

    ranks = ps.get_data_parallel_world_size(with_context_parallel=True)
    rank = ps.get_data_parallel_rank(with_context_parallel=True)
    case, tp = built.case, built.topology.tp
    largest = 0.0
    for attention in attentions(built):
        whole = largest_logits(case, attention.layer_number, step).to(dtype)
        largest = max(largest, whole.max().item())
        here = torch.arange(case.heads) % ranks == rank  # each head's largest is on one rank
        mine = torch.where(here, whole, BELOW * whole).chunk(tp)[built.tp_rank]
        attention.core_attention.current_max_attn_logits = mine.clone()
    return largest


def _start(case: Case, topology: Topology) -> Built:
    built = build(case, topology)
    built.optimizer = make_optimizer(built)
    return built


def clipped(case: Case, topology: Topology, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What this rank holds after the case's steps, each with Megatron's call of ``clip_qk``."""
    import megatron_muon

    megatron_muon.install(megatron_muon.MuonConfig(**dict(case.muon)))
    try:
        from megatron.core.optimizer import qk_clip

        built = _start(case, topology)

        def clip() -> None:
            largest = set_logits(built, step, dtype)
            assert qk_clip.clip_qk(built.chunks) == largest

        for step in range(case.steps):
            take_step(built, step, clip)
        return held(built)
    finally:
        megatron_muon.uninstall()


def clipped_whole(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same on one process, where Megatron's own clip gets whole main parameters."""
    import megatron_muon

    megatron_muon.install(megatron_muon.MuonConfig(**dict(case.muon)))
    try:
        built = _start(case, Topology())
    finally:
        megatron_muon.uninstall()

    def clip() -> None:
        set_logits(built, step, dtype)
        for attention in attentions(built):
            _clip_by_megatron(attention)

    for step in range(case.steps):
        take_step(built, step, clip)
    return held(built)


def _clip_by_megatron(attention: Any) -> None:
    params = [param for param in attention.parameters() if hasattr(param, "main_param")]
    flat = [param.main_param for param in params]
    for param, main in zip(params, flat, strict=True):
        param.main_param = main.view(param.shape)
    try:
        attention.clip_qk()
    finally:
        for param, main in zip(params, flat, strict=True):
            param.main_param = main
