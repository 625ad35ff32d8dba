"""Megatron's symbols that build a model and its ranks without memory.

``routes``, ``plan``, the benchmark and ``doctor`` check them; ``install()`` does not, since a run
does not need them. Those of Megatron-LM's scripts are the part ``script``.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Seam, Use, Version

_STATE = "megatron.core.parallel_state"
_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_MTP = "megatron.core.transformer.multi_token_prediction"
_LOOP = "megatron.training.training"


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


def _script(module: str, name: str, relied_on: str, *parameters: str, use: Use = "called") -> Seam:
    return Seam(module, name, use, relied_on, parameters, part="script")


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
        _MTP,
        "is_inference_column_parallel_linear",
        "asks for a class of Transformer Engine's; replaced, as a local model has none",
        since=(0, 20),
        use="replaced",
    ),
    # --- a run's own script
    _script(_LOOP, "pretrain", "trains; replaced to stop a script there", use="replaced"),
    _script(_LOOP, "setup_model_and_optimizer", "builds the model, then asks for its optimizer"),
    _script(_LOOP, "get_megatron_optimizer", "replaced to stop it there", use="replaced"),
    _script("megatron.training", "pretrain", "what a script imports", use="replaced"),
    _script("megatron.training", "get_args", "the arguments, validated"),
    _script(
        "megatron.training.initialize",
        "initialize_megatron",
        "parses and validates the arguments, and nothing more",
        "skip_mpu_initialization",
    ),
    Seam(
        "megatron.core.process_groups_config",
        "ProcessGroupCollection.use_mpu_process_groups",
        "called",
        "the groups of a rank, for scripts that hand them to the model",
        since=(0, 16),
        part="script",
    ),
    _script("megatron.training.global_vars", "set_args", "whose model is built", "args"),
    _script("megatron.training.global_vars", "destroy_global_vars", "forgets an earlier script"),
    _script(
        "megatron.core.num_microbatches_calculator",
        "destroy_num_microbatches_calculator",
        "forgets an earlier script",
    ),
    _script(
        "megatron.core.rerun_state_machine",
        "destroy_rerun_state_machine",
        "forgets an earlier script",
    ),
)
