"""Megatron's hybrid model from local modules: Transformer Engine and mamba_ssm are not needed.

Megatron has the layers of a hybrid model in one specification, of Transformer Engine's modules.
Here each layer is its local GPT layer without the other half, and the Mamba mixer with local
linears and a norm before it: the same parameters. A norm that Transformer Engine has in a linear is
a module of its own there. The classes are Megatron's, so that its versions build what they do.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from argparse import Namespace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer import transformer_layer as layers
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_muon.lab.dry_run.hybrid.gated_delta import attention_spec
from megatron_muon.lab.dry_run.stand_ins import MIXER, imported, without_kernels
from megatron_muon.lab.dry_run.versions import having
from megatron_muon.runtime.patches import replaced


def build_hybrid(flags: Namespace, config: Any, **options: Any) -> Any:
    """The hybrid model, or this rank's part of it.

    Args:
        flags: see ``flags``, settled by ``hybrid.settings.settle``.
        config: Megatron's TransformerConfig.
        options: those of the model that a GPT has too: ``vocab_size``, ``pre_process``, ...
    """
    model, stack = _classes()
    known = inspect.signature(model).parameters
    spec_name = "hybrid_stack_spec" if "hybrid_stack_spec" in known else "mamba_stack_spec"
    pattern = {
        name: getattr(flags, name, None)
        for name in (
            *("hybrid_attention_ratio", "hybrid_mlp_ratio", "hybrid_override_pattern"),
            "hybrid_layer_pattern",
        )
        if getattr(flags, name, None)
    }
    with without_kernels():
        spec = _stack_spec(config, stack)
        norm = _local_layer(config).input_layernorm
        with replaced(sys.modules[stack.__module__], TENorm=norm):
            return model(config=config, **{spec_name: spec}, **having(model, **pattern), **options)


def _classes() -> tuple[Any, Any]:
    """The model's and the stack's; named after Mamba before 0.18."""
    try:
        model = importlib.import_module("megatron.core.models.hybrid.hybrid_model").HybridModel
        stack = importlib.import_module("megatron.core.models.hybrid.hybrid_block").HybridStack
    except ModuleNotFoundError:
        model = imported("megatron.core.models.mamba.mamba_model").MambaModel
        stack = imported("megatron.core.ssm.mamba_block").MambaStack
    return model, stack


def _stack_spec(config: Any, stack: Any) -> ModuleSpec:
    """The layers that this version has."""
    module = sys.modules[stack.__module__]
    submodules: Any = getattr(module, f"{stack.__name__}Submodules")
    own = {field.name for field in dataclasses.fields(submodules)}
    specs = {name: make(config) for name, make in _LAYERS.items() if name in own}
    return ModuleSpec(module=stack, submodules=submodules(**specs))


def _local_layer(config: Any, **options: Any) -> Any:
    """The parts of Megatron's local GPT layer."""
    make = gpt_layer_specs.get_gpt_layer_local_spec
    return make(normalization=config.normalization, **options).submodules


def _mamba(config: Any) -> ModuleSpec:
    layer, mixer = imported("megatron.core.ssm.mamba_layer"), imported(MIXER)
    return ModuleSpec(
        module=layer.MambaLayer,
        submodules=layer.MambaLayerSubmodules(
            norm=_local_layer(config).input_layernorm,
            mixer=ModuleSpec(
                module=mixer.MambaMixer,
                submodules=mixer.MambaMixerSubmodules(
                    in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                ),
            ),
            mamba_bda=get_bias_dropout_add,
        ),
    )


def _attention(config: Any, **options: Any) -> ModuleSpec:
    local = _local_layer(config, **options)
    return ModuleSpec(
        module=layers.TransformerLayer,
        submodules=layers.TransformerLayerSubmodules(
            input_layernorm=local.input_layernorm,
            self_attention=local.self_attention,
            self_attn_bda=local.self_attn_bda,
        ),
    )


def _latent_attention(config: Any) -> ModuleSpec:
    return _attention(config, multi_latent_attention=True)


def _gated_delta(config: Any) -> ModuleSpec:
    spec = _attention(config)
    spec.submodules.self_attention = attention_spec(config)
    return spec


def _mlp(config: Any) -> ModuleSpec:
    module = imported("megatron.core.ssm.mlp_layer").MLPLayer
    return ModuleSpec(module=module, submodules=_feed_forward(_local_layer(config)))


def _moe(config: Any) -> ModuleSpec:
    if not config.num_moe_experts:
        return ModuleSpec(module=_NoExperts)
    local = _local_layer(config, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    module = getattr(layers, "MoETransformerLayer", layers.TransformerLayer)
    return ModuleSpec(module=module, submodules=_feed_forward(local))


class _NoExperts(torch.nn.Module):
    """Stands in for a layer of experts where no flag says how many there are: an error."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise ValueError("the pattern has layers of experts, 'E': give --num-experts")


def _feed_forward(local: Any) -> Any:
    return layers.TransformerLayerSubmodules(
        pre_mlp_layernorm=local.pre_mlp_layernorm, mlp=local.mlp, mlp_bda=local.mlp_bda
    )


def _mtp(config: Any) -> ModuleSpec:
    """Its inner layers are made from the pattern and the specifications above."""
    norm = _local_layer(config).input_layernorm
    layer = ModuleSpec(
        module=mtp.MultiTokenPredictionLayer,
        submodules=mtp.MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=None,
            layer_norm=norm,
        ),
    )
    return ModuleSpec(
        module=mtp.MultiTokenPredictionBlock,
        submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )


_LAYERS = {
    "mamba_layer": _mamba,
    "attention_layer": _attention,
    "mla_layer": _latent_attention,
    "gdn_layer": _gated_delta,
    "mlp_layer": _mlp,
    "moe_layer": _moe,
    "mtp_block_spec": _mtp,
}
