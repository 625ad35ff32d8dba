"""Runs whose logits cannot be clipped end before training, with the cause and the way
out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from support.installed import VERSION, installed
from support.models.clipped import attentions
from support.models.gpt import build, optimizer_config
from support.ranks import error_of, run
from support.runs.cases import Case
from support.runs.topologies import ONE

MUON = Case(steps=1)
ADAM = Case(steps=1, optimizer="adam")
OURS = {"qk_clip": 100.0}
RELATIVE = "T5's"  # in the place of Megatron's module, which a rank makes
NAME = "decoder.layers.0.self_attention"

# A case, a setting of one of its parts, its value, and what the error says.
REFUSED: dict[str, tuple[Case, str, Any, str]] = {
    "no distributed optimizer": (
        ADAM,
        "optimizer.use_distributed_optimizer",
        False,
        "qk_clip (--muon-qk-clip) clips shards of the distributed optimizer",
    ),
    "mxfp8": (
        ADAM,
        "optimizer.reuse_grad_buf_for_mxfp8_param_ag",
        True,
        "they are gathered in the memory of gradients",
    ),
    "early gather": (
        ADAM,
        "optimizer.overlap_param_gather_with_optimizer_step",
        True,
        "weights are gathered before they are clipped",
    ),
    "fsdp": (
        ADAM,
        "ddp.use_megatron_fsdp",
        True,
        "with use_megatron_fsdp (--use-megatron-fsdp): a rank has parts of the weights "
        "themselves",
    ),
    "norms after the projection": (
        ADAM,
        "model.qk_layernorm",
        True,
        f"qk_clip (--muon-qk-clip) with qk_layernorm (--qk-layernorm): {NAME} "
        "normalizes queries and keys after their projection",
    ),
    "window": (MUON, "softmax.window_size", (8, 0), f"{NAME} has window_size=(8, 0)"),
    "another attention": (
        MUON,
        "attention.core_attention",
        None,
        f"{NAME} computes its logits in a NoneType, which does not tell their maximum",
    ),
    "a norm that the model's settings do not name": (
        MUON,
        "attention.k_layernorm",
        torch.nn.LayerNorm(8),
        f"{NAME} normalizes queries and keys after their projection",
    ),
    "a learned scale": (
        MUON,
        "core.scale",
        torch.nn.Parameter(torch.ones(1)),
        f"{NAME}.core_attention.scale may be part of a largest logit",
    ),
    "an attention's own parameter": (
        ADAM,
        "attention.key_shift",
        torch.nn.Parameter(torch.ones(1)),
        f"{NAME}.key_shift may be part",
    ),
    "an adapter in the projection": (
        ADAM,
        "linear.lora_a",
        torch.nn.Linear(2, 2),
        f"{NAME}.linear_qkv.lora_a.weight may be part",
    ),
    "relative positions": (
        ADAM,
        "attention.relative_pos_emb",
        RELATIVE,
        f"{NAME}.relative_pos_emb.relative_attention_bias.weight may be part",
    ),
    "both flags": (
        replace(MUON, qk_clip=(100.0, 0.5)),
        "model.unknown",
        None,
        "qk_clip (--muon-qk-clip) 100.0 and Megatron's --qk-clip both clip",
    ),
    "threshold": (
        replace(ADAM, qk_clip=(0.0, 0.5)),
        "model.unknown",
        None,
        "Megatron's --qk-clip-threshold must be above 0, got 0.0",
    ),
    "alpha": (
        replace(MUON, qk_clip=(100.0, 1.0)),
        "model.unknown",
        None,
        "Megatron's --qk-clip-alpha must be between 0 and 1, got 1.0",
    ),
}
MEGATRONS = ("threshold", "alpha")  # where the plugin's flag is not given


@pytest.mark.parametrize("which", REFUSED)
def test_what_cannot_be_clipped_is_refused(which: str) -> None:
    case, name, value, says = REFUSED[which]
    if case.qk_clip and VERSION < (0, 16):
        pytest.skip("this core has no --qk-clip")
    (error,) = run(_error, 1, case, name, value, {} if which in MEGATRONS else OURS)
    assert says in error and any(
        way in error
        for way in ("run without", "must be", "or drop it", "Use only one of the two")
    )


def _error(case: Case, name: str, value: Any, settings: dict[str, float]) -> str:
    from megatron.core import optimizer

    built = build(case, ONE)
    config = optimizer_config(built)
    where, _, setting = name.partition(".")
    if value == RELATIVE:
        value = _relative_positions()
    for attention in attentions(built):
        owners = {
            "model": attention.config,
            "ddp": built.ddp.ddp_config,
            "optimizer": config,
            "attention": attention,
            "core": attention.core_attention,
            "linear": attention.linear_qkv,
            "softmax": attention.core_attention
            and attention.core_attention.scale_mask_softmax,
        }
        setattr(owners[where], setting, value)
    with installed(MuonConfig(**settings)):
        return error_of(lambda: optimizer.get_megatron_optimizer(config, built.chunks))


def _relative_positions() -> Any:
    from megatron.core.models.common.embeddings import relative_pos_embedding

    return relative_pos_embedding.RelativePositionEmbedding(
        bidirectional=False, init_method=torch.nn.init.zeros_, num_attention_heads=4
    )
