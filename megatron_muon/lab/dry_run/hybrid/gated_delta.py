"""GPT layers with a gated delta net in place of attention: ``--experimental-attention-variant``.

Megatron specifies them with Transformer Engine's modules only; here they are local layers whose
attention is replaced. Source: megatron/core/models/gpt/experimental_attention_variant_module_specs
at core_v0.16.1 to main.
"""

from __future__ import annotations

import copy
import importlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

_VARIANTS = ("gated_delta_net", "gdn", "gdn2")


def variant_of(flags: Namespace) -> str | None:
    """The kind of linear attention that some layers have.

    Raises:
        ValueError: it is none that is built here, or --linear-attention-freq is missing.
    """
    variant: str | None = getattr(flags, "experimental_attention_variant", None)
    frequency = getattr(flags, "linear_attention_freq", None)
    if variant is None:
        if frequency is not None:
            raise ValueError("--linear-attention-freq needs --experimental-attention-variant")
        return None
    if variant not in _VARIANTS:
        raise ValueError(
            f"--experimental-attention-variant {variant} is not supported, only "
            f"{', '.join(_VARIANTS)}: Megatron makes others of Transformer Engine's modules only"
        )
    if frequency is None:
        raise ValueError(
            f"--experimental-attention-variant {variant} needs --linear-attention-freq: N for full "
            "attention in every N-th layer, or a list with 1 for each layer that has the variant"
        )
    return variant


def attention_spec(config: Any) -> Any:
    """The gated delta net's own, of local modules."""
    return _specs().get_gated_delta_net_module_spec(config=config, backend=_local())


def without_variant(config: Any) -> Any:
    """The configuration for Megatron's functions that make layers with attention only."""
    if getattr(config, "experimental_attention_variant", None) is None:
        return config
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def with_variant(config: Any, layers: Sequence[Any], chunk: dict[str, int | None]) -> list[Any]:
    """The layers of a chunk, those that have the variant with its attention.

    Args:
        config: Megatron's TransformerConfig.
        layers: specifications of local layers, in order.
        chunk: names the virtual stage, as in ``chunks``.
    """
    pattern = _specs().get_linear_attention_pattern(config=config)
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        offset = get_transformer_layer_offset(config, **chunk)
        numbers = list(range(offset, offset + len(layers)))
    else:
        decoder = importlib.import_module("megatron.core.transformer.enums").LayerType.decoder
        numbers = layout.get_layer_id_list(layer_type=decoder, **chunk)
    return [
        _replaced(layer, config) if pattern[number] else layer
        for layer, number in zip(layers, numbers, strict=True)
    ]


def of_mtp(config: Any, layer: Any) -> Any:
    """Multi-token prediction has the decoder's last layer; before 0.19 always with attention."""
    later = hasattr(_specs(), "get_transformer_layer_with_experimental_attention_variant_spec")
    last = _specs().get_linear_attention_pattern(config=config)[-1]
    return _replaced(layer, config) if later and last else layer


def _replaced(layer: Any, config: Any) -> Any:
    layer = copy.copy(layer)
    layer.submodules = copy.copy(layer.submodules)
    layer.submodules.self_attention = attention_spec(config)
    return layer


def _specs() -> Any:
    name = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
    return importlib.import_module(name)


def _local() -> Any:
    """Megatron's provider of local modules; a norm before a linear is a module of the layer."""
    local: type[Any] = importlib.import_module("megatron.core.models.backends").LocalSpecProvider
    methods = {"column_parallel_layer_norm_linear": lambda self: ColumnParallelLinear}
    return type("Local", (local,), methods)()
