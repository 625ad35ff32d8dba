"""Models of all kinds on the meta device, with stand-ins for kernels: what of a weight
TP cuts.

``python -m support.models.meta_models NAME ...`` prints, by model and weight, whether
its shape at TP 2 is another than at TP 1, and whether the plugin counts its gradient on
the second TP rank. A process of its own: stand-ins come before Megatron.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_muon.lab.dry_run import stand_ins


def _options(text: str) -> dict[str, Any]:
    """Settings of Megatron's, of ``NAME=VALUE`` each."""
    pairs = (word.split("=") for word in text.split())
    return {name: ast.literal_eval(value) for name, value in pairs}


SIZES = _options(
    """
    num_layers=2 hidden_size=128 num_attention_heads=8 ffn_hidden_size=256
    kv_channels=16 gradient_accumulation_fusion=False
    """
)
MOE = _options("num_moe_experts=4 moe_router_topk=2 moe_ffn_hidden_size=64")
SHARED = _options("moe_shared_expert_intermediate_size=64 moe_shared_expert_gate=True")
LATENT = _options(
    """
    multi_latent_attention=True q_lora_rank=64 kv_lora_rank=64 qk_head_dim=16
    qk_pos_emb_head_dim=16 v_head_dim=16 rope_type='rope' qk_layernorm=True
    """
)
INDEXER = _options(
    """
    experimental_attention_variant='dsa' dsa_indexer_n_heads=4
    dsa_indexer_head_dim=32 dsa_indexer_topk=8 sequence_parallel=True
    """
)
DELTA = _options(
    """
    experimental_attention_variant='gated_delta_net' linear_attention_freq=2
    linear_key_head_dim=16 linear_value_head_dim=16 linear_num_key_heads=4
    linear_num_value_heads=8 linear_conv_kernel_dim=4 attention_output_gate=True
    """
)
MAMBA = _options(
    """
    mamba_head_dim=16 mamba_num_groups=4 mamba_state_dim=16 is_hybrid_model=True
    add_bias_linear=False
    """
)
NO_BIAS = _options("add_bias_linear=False")


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _config(tp: int, **options: Any) -> Any:
    import torch

    made = _core("transformer")
    made = (
        made.MLATransformerConfig
        if "q_lora_rank" in options
        else made.TransformerConfig
    )
    sizes = {
        **SIZES,
        **options,
        "tensor_model_parallel_size": tp,
        "params_dtype": torch.bfloat16,
    }
    sizes["sequence_parallel"] = options.get("sequence_parallel", False) and tp > 1
    known = inspect.signature(made).parameters
    return made(**{name: value for name, value in sizes.items() if name in known})


def _spec(config: Any, local: bool) -> Any:
    specs = _core("models.gpt.gpt_layer_specs")
    if getattr(config, "experimental_attention_variant", None):
        variants = _core("models.gpt.experimental_attention_variant_module_specs")
        return variants.get_transformer_block_with_experimental_attention_variant_spec(
            config
        )
    if config.num_moe_experts:
        return specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=not local
        )
    made = getattr(
        specs, f"get_gpt_layer_{'local' if local else 'with_transformer_engine'}_spec"
    )
    latent = config.multi_latent_attention
    spec = made(qk_layernorm=config.qk_layernorm, multi_latent_attention=latent)
    if getattr(config, "enable_mhc_connections", False):
        hyper_connected(spec)
    return spec


def hyper_connected(spec: Any) -> Any:
    """A layer's spec with hyper-connections, which no function of Megatron's makes."""
    spec.module = _core("transformer.transformer_layer").HyperConnectionTransformerLayer
    module = _core("transformer.hyper_connection").HyperConnectionModule
    for name in ("self_attention_hyper_connection", "mlp_hyper_connection"):
        setattr(spec.submodules, name, module)
    return spec


def _gpt(local: bool = False, mtp: int = 0, **options: Any) -> Callable[[int], Any]:
    def build(tp: int) -> Any:
        config = _config(tp, **options, **({"mtp_num_layers": mtp} if mtp else {}))
        spec, further = _spec(config, local), {}
        if mtp:
            block = _core("models.gpt.gpt_layer_specs").get_gpt_mtp_block_spec
            further["mtp_block_spec"] = block(config, spec, use_transformer_engine=True)
        model = _core("models.gpt").GPTModel
        return model(config, spec, 256, 32, position_embedding_type="rope", **further)

    return build


def _hybrid(pattern: str, stack: str = "", **options: Any) -> Callable[[int], Any]:
    def build(tp: int) -> Any:
        try:
            specs = _core("models.hybrid.hybrid_layer_specs")
            model, spec = (
                _core("models.hybrid.hybrid_model").HybridModel,
                "hybrid_stack_spec",
            )
        except ModuleNotFoundError:  # named after Mamba before 0.18
            from support.models.local_hybrid import imported  # where there is no triton

            model = imported("megatron.core.models.mamba.mamba_model").MambaModel
            specs = imported("megatron.core.models.mamba.mamba_layer_specs")
            spec = "mamba_stack_spec"
        known = inspect.signature(model).parameters
        name = "hybrid_layer_pattern"
        name = name if name in known else "hybrid_override_pattern"
        config = _config(tp, **{**MAMBA, **options, "num_layers": len(pattern)})
        return model(
            config,
            **{spec: getattr(specs, stack or spec), name: pattern},
            vocab_size=256,
            max_sequence_length=32,
        )

    return build


def _t5(tp: int) -> Any:
    specs = _core("models.T5.t5_spec")
    model = _core("models.T5.t5_model").T5Model
    config = _config(tp)
    blocks = (
        specs.get_t5_encoder_with_transformer_engine_block_spec(2),
        specs.get_t5_decoder_with_transformer_engine_block_spec(2),
    )
    return model(config, config, *blocks, vocab_size=256, max_sequence_length=32)


def _bert(tp: int) -> Any:
    spec = _core("models.bert.bert_layer_specs").bert_layer_with_transformer_engine_spec
    return _core("models.bert.bert_model").BertModel(_config(tp), 2, spec, 256, 32)


def _vision(tp: int) -> Any:
    spec = _core(
        "models.vision.vit_layer_specs"
    ).get_vit_layer_with_transformer_engine_spec()
    model = _core("models.vision.radio").RADIOViTModel
    return model(_config(tp), spec, img_h=32, img_w=32, max_img_h=32, max_img_w=32)


MODELS: dict[str, Callable[[int], Any]] = {
    "biases": _gpt(qk_layernorm=True),
    "local": _gpt(local=True, qk_layernorm=True),
    "sinks": _gpt(local=True, softmax_type="learnable"),
    "output gate": _gpt(attention_output_gate=True),
    "one group": _gpt(num_query_groups=1, **NO_BIAS),
    "latent": _gpt(**LATENT),
    "indexer": _gpt(**LATENT, **INDEXER, **NO_BIAS),
    "experts": _gpt(**MOE, **NO_BIAS, **SHARED, moe_grouped_gemm=True),
    "sequential experts": _gpt(local=True, **MOE, **NO_BIAS),
    "latent experts": _gpt(**MOE, **NO_BIAS, moe_grouped_gemm=True, moe_latent_size=64),
    "MTP": _gpt(mtp=2),
    "hyper-connections": _gpt(local=True, enable_mhc_connections=True),
    "delta nets": _gpt(**DELTA, **NO_BIAS),
    "delta nets 2": _gpt(
        **{**DELTA, **NO_BIAS, "experimental_attention_variant": "gdn2"}
    ),
    "Mamba": _hybrid("M*-M"),
    "Mamba with experts": _hybrid("M*EM", **MOE, moe_grouped_gemm=True),
    "delta products": _hybrid(
        "M*-M", "gated_delta_product_stack_spec", mamba_num_heads=16
    ),
    "T5": _t5,
    "BERT": _bert,
    "RADIO": _vision,
}


def _built(model: Callable[[int], Any], tp: int) -> dict[str, Any]:
    """The weights of the last TP rank by name."""
    from megatron_muon.lab.dry_run.model import Ranks
    from megatron_muon.lab.dry_run.world import as_rank, without_memory
    from megatron_muon.mcore.routing.param_routing import weights

    order = "tp-cp-ep-dp-pp"
    with as_rank(tp - 1, Ranks(tp, tp, 1, 1, 1, tp, None, 1, order)), without_memory():
        return {weight.name: weight for weight in weights([model(tp)])}


def _counted(weight: Any, tp: int) -> bool:
    from megatron_muon.mcore.wiring.gradients import counts_here

    last = SimpleNamespace(size=lambda: tp, rank=lambda: tp - 1)
    stage: Any = SimpleNamespace(tp=last, expert_tp=last)
    here = counts_here(weight, stage)
    return bool(
        getattr(weight.param, "tensor_model_parallel", False) if here is None else here
    )


def _compared(model: Callable[[int], Any], tp: int) -> dict[str, Any]:
    one = _built(model, 1)
    several = _built(model, tp)
    assert one.keys() == several.keys(), one.keys() ^ several.keys()
    return {
        name: (one[name].param.shape != weight.param.shape, _counted(weight, tp))
        for name, weight in several.items()
    }


def main() -> None:
    stand_ins.install()
    with contextlib.redirect_stdout(sys.stderr):
        import megatron_muon.cpu

        megatron_muon.cpu.enable(allow_cuda=True)
        found = {name: _compared(MODELS[name], 2) for name in sys.argv[1:]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
