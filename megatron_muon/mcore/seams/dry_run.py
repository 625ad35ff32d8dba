"""Megatron's symbols that build a model and its ranks without memory.

``routes``, ``plan``, the benchmark and ``doctor`` check them; ``install()`` does not, since a run
does not need them. The rows of hybrid models are their own part, since a GPT does not need them.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Seam, Use, Version

_STATE = "megatron.core.parallel_state"
_LAYERS = "megatron.core.tensor_parallel.layers"
_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_LAYER = "megatron.core.transformer.transformer_layer"
_MTP = "megatron.core.transformer.multi_token_prediction"
_PIPELINE = "megatron.core.transformer.pipeline_parallel_layer_layout"
_VARIANTS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_MIXER = "megatron.core.ssm.mamba_mixer"
_DELTA = "megatron.core.ssm.gated_delta_net"
_PATTERN = ("megatron.core.ssm.mamba_hybrid_layer_allocation", (0, 17), (0, 17))
_LATER_PATTERN = ("megatron.core.models.hybrid.hybrid_layer_allocation", (0, 18), NEWEST)


def _seam(
    module: str,
    name: str,
    relied_on: str,
    parameters: tuple[str, ...] = (),
    since: Version = OLDEST,
    until: Version = NEWEST,
    use: Use = "called",
) -> Seam:
    return Seam(module, name, use, relied_on, parameters, since, until, part="dry_run")


def _hybrid(
    module: str,
    name: str,
    relied_on: str,
    since: Version = OLDEST,
    until: Version = NEWEST,
    use: Use = "called",
) -> Seam:
    return Seam(module, name, use, relied_on, (), since, until, part="hybrid")


def _of_pattern(name: str, relied_on: str) -> tuple[Seam, ...]:
    """A row for each of the two modules that read patterns: Megatron moved them in 0.18."""
    return tuple(
        _hybrid(module, name, relied_on, since, until)
        for module, since, until in (_PATTERN, _LATER_PATTERN)
    )


_STACK = (
    ("megatron.core.ssm.mamba_block", "Mamba", OLDEST, (0, 17)),
    ("megatron.core.models.hybrid.hybrid_block", "Hybrid", (0, 18), NEWEST),
)
_STACKS = tuple(
    seam
    for module, name, since, until in _STACK
    for seam in (
        _hybrid(module, f"{name}Stack", "the layers of a pattern", since, until),
        _hybrid(module, f"{name}StackSubmodules", "the layers that it has", since, until),
        _hybrid(module, "TENorm", "the norm at its end, replaced", since, until, "replaced"),
    )
)

SEAMS = (
    # --- ranks
    _seam(
        _STATE,
        "initialize_model_parallel",
        "makes the process groups of a rank, over groups that do nothing",
        (
            *("context_parallel_size", "expert_model_parallel_size", "order"),
            *("num_distributed_optimizer_instances", "expert_tensor_parallel_size"),
            "create_gloo_process_groups",
        ),
    ),
    _seam(_STATE, "destroy_model_parallel", "forgets those groups"),
    _seam(
        _STATE,
        "create_group",
        "makes a group; replaced to skip groups that the rank is not in",
        ("ranks",),
        use="replaced",
    ),
    _seam(
        _STATE,
        "RankGenerator",
        "which ranks are in which group",
        ("tp", "ep", "dp", "pp", "cp", "order"),
    ),
    _seam(_STATE, "RankGenerator.get_ranks", "the groups of a kind", ("token",)),
    _seam(
        _STATE,
        "is_pipeline_first_stage",
        "whether a stage has the embedding",
        ("ignore_virtual",),
    ),
    _seam(_STATE, "is_pipeline_last_stage", "whether a stage has the output", ("ignore_virtual",)),
    _seam(
        _STATE,
        "set_virtual_pipeline_model_parallel_rank",
        "which chunk is built, before models took vp_stage",
        until=(0, 12),
    ),
    _seam(
        "megatron.core.tensor_parallel.random",
        "model_parallel_cuda_manual_seed",
        "seeds for the initialization of weights",
        ("seed",),
    ),
    _seam(
        _STATE,
        "get_data_parallel_world_size",
        "how many shards a buffer has, which decides the size of buckets",
        ("with_context_parallel",),
    ),
    # --- a GPT
    _seam("megatron.core.models.gpt", "GPTModel", "the model", ("config", "pre_process")),
    _seam("megatron.core.transformer.module", "Float16Module", "wraps a model in 16 bits"),
    _seam("megatron.core.transformer", "MLATransformerConfig", "settings with latent attention"),
    _seam(
        "megatron.core.tensor_parallel",
        "set_defaults_if_not_set_tensor_model_parallel_attributes",
        "marks on parameters that TP does not split",
        ("tensor",),
    ),
    _seam(
        _SPECS,
        "get_gpt_layer_local_spec",
        "a layer of Megatron's local modules",
        ("num_experts", "moe_grouped_gemm", "qk_layernorm", "multi_latent_attention"),
    ),
    _seam(
        _SPECS,
        "get_gpt_decoder_block_spec",
        "the layers of a model with experts",
        ("config", "use_transformer_engine", "normalization"),
    ),
    _seam(
        _SPECS,
        "get_gpt_decoder_layer_specs",
        "the same for all stages; MTP's layer is like the last",
        ("config", "use_transformer_engine", "normalization"),
        since=(0, 16),
    ),
    _seam(
        _SPECS,
        "get_gpt_mtp_block_spec",
        "the layers of multi-token prediction",
        ("config", "spec", "use_transformer_engine"),
    ),
    _seam(
        _PIPELINE,
        "PipelineParallelLayerLayout",
        "which layers a stage has by --pipeline-model-parallel-layout",
        since=(0, 14),
    ),
    _seam(
        _PIPELINE,
        "PipelineParallelLayerLayout.get_num_stages_from_str",
        "how many stages it names",
        since=(0, 14),
    ),
    _seam(
        _PIPELINE,
        "PipelineParallelLayerLayout.get_layer_id_list",
        "which layers a stage has",
        ("layer_type",),
        since=(0, 14),
    ),
    _seam(
        _MTP,
        "is_inference_column_parallel_linear",
        "asks for a class of Transformer Engine's; replaced, as a local model has none",
        since=(0, 20),
        use="replaced",
    ),
    # --- linear attention
    _seam(
        _VARIANTS,
        "get_gated_delta_net_module_spec",
        "a gated delta net",
        ("config", "backend"),
        since=(0, 16),
    ),
    _seam(
        _VARIANTS,
        "get_linear_attention_pattern",
        "which layers have it",
        ("config",),
        since=(0, 16),
    ),
    _seam(
        _VARIANTS,
        "get_transformer_layer_with_experimental_attention_variant_spec",
        "where it exists, MTP's layer has linear attention, too",
        since=(0, 19),
        use="read",
    ),
    _seam(
        "megatron.core.models.backends",
        "LocalSpecProvider",
        "which local modules a gated delta net is made of",
        since=(0, 14),
        use="subclassed",
    ),
    _seam(
        "megatron.core.transformer.enums",
        "LayerType.decoder",
        "the layers that a pipeline layout is asked for",
        since=(0, 14),
        use="read",
    ),
    _seam(_LAYER, "get_transformer_layer_offset", "the number of a stage's first layer"),
    _seam(_LAYERS, "ColumnParallelLinear", "a linear whose outputs TP splits", use="read"),
    # --- hybrid models
    _hybrid(_LAYERS, "RowParallelLinear", "a linear whose inputs TP splits", use="read"),
    _hybrid(
        "megatron.core.fusions.fused_bias_dropout",
        "get_bias_dropout_add",
        "the end of a layer",
        use="read",
    ),
    _hybrid("megatron.core.transformer.spec_utils", "ModuleSpec", "names a layer's modules"),
    _hybrid(_LAYER, "TransformerLayer", "attention, or a feed-forward part, alone", use="read"),
    _hybrid(_LAYER, "TransformerLayerSubmodules", "the modules of such a layer"),
    _hybrid(_LAYER, "MoETransformerLayer", "a layer of experts alone", (0, 16), use="read"),
    _hybrid(_MTP, "MultiTokenPredictionBlock", "layers of multi-token prediction", use="read"),
    _hybrid(_MTP, "MultiTokenPredictionBlockSubmodules", "its layers"),
    _hybrid(_MTP, "MultiTokenPredictionLayer", "one such layer", use="read"),
    _hybrid(_MTP, "MultiTokenPredictionLayerSubmodules", "its modules"),
    *_STACKS,
    _hybrid("megatron.core.models.mamba.mamba_model", "MambaModel", "the model", until=(0, 17)),
    _hybrid("megatron.core.models.hybrid.hybrid_model", "HybridModel", "the model", (0, 18)),
    *_of_pattern("parse_hybrid_pattern", "reads a pattern"),
    *_of_pattern("get_hybrid_total_layer_count", "counts its layers"),
    *_of_pattern("get_hybrid_total_pipeline_segment_count", "counts its stages"),
    _hybrid("megatron.core.ssm.mamba_layer", "MambaLayer", "a Mamba layer", use="read"),
    _hybrid("megatron.core.ssm.mamba_layer", "MambaLayerSubmodules", "its modules"),
    _hybrid("megatron.core.ssm.mlp_layer", "MLPLayer", "a layer of an MLP alone", use="read"),
    _hybrid(_MIXER, "MambaMixer", "the mixer", use="read"),
    _hybrid(_MIXER, "MambaMixerSubmodules", "its linears"),
    _hybrid(_MIXER, "ExtendedRMSNorm", "mamba_ssm's norm, by a stand-in", use="replaced"),
    _hybrid(_MIXER, "HAVE_MAMBA_SSM", "whether there are kernels", (0, 14), use="replaced"),
    _hybrid(_MIXER, "HAVE_EINOPS", "whether there is einops", (0, 14), use="replaced"),
    _hybrid(_DELTA, "HAVE_FLA", "whether there are kernels", (0, 16), use="replaced"),
    _hybrid(_DELTA, "chunk_gated_delta_rule", "one of those kernels", (0, 16), use="replaced"),
)
