"""What builds a model and its ranks without memory: ``routes``, ``plan`` and ``bench``
check it.
"""

from megatron_muon.mcore.seams.row import Place

_STATE = Place("megatron.core.parallel_state")
_TRANSFORMER = Place("megatron.core.transformer")
_PARALLEL = Place("megatron.core.tensor_parallel")
_SPECS = Place("megatron.core.models.gpt.gpt_layer_specs")
_GROUPS = Place(
    "megatron.core.process_groups_config", "ProcessGroupCollection", since=(0, 16)
)
_TRAINING = Place("megatron.training")
_LOOP = Place("megatron.training.training")
_VARIABLES = Place("megatron.training.global_vars")
_INITIALIZE = Place("megatron.training.initialize")
_FAKE = Place("torch.testing._internal.distributed.fake_pg")
_BLOCK = "config use_transformer_engine normalization"
ROWS = (
    # --- ranks
    _STATE.called(
        "initialize_model_parallel",
        "makes the process groups of a rank, over groups that do nothing",
        "context_parallel_size expert_model_parallel_size order "
        "create_gloo_process_groups num_distributed_optimizer_instances "
        "expert_tensor_parallel_size",
    ),
    _STATE.called("destroy_model_parallel", "forgets those groups"),
    _STATE.replaced("create_group", "skips groups that the rank is not in", "ranks"),
    _STATE.called(
        "RankGenerator", "which ranks are in which group", "tp ep dp pp cp order"
    ),
    _STATE.called("RankGenerator.get_ranks", "the groups of a kind", "token"),
    _STATE.called("is_pipeline_first_stage", "who has the embedding", "ignore_virtual"),
    _STATE.called("is_pipeline_last_stage", "who has the output", "ignore_virtual"),
    _STATE.called(
        "set_virtual_pipeline_model_parallel_rank",
        "which chunk is built",
        until=(0, 12),
    ),
    _STATE.called(
        "get_data_parallel_world_size", "shards of a buffer", "with_context_parallel"
    ),
    Place("megatron.core.tensor_parallel.random").called(
        "model_parallel_cuda_manual_seed",
        "seeds for the initialization of weights",
        "seed",
    ),
    _FAKE.called("FakeStore", "process groups that do nothing"),
    Place("torch.cuda").replaced("current_device", "the meta device"),
    # --- a GPT
    Place("megatron.core.models.gpt").called(
        "GPTModel", "the model", "config pre_process"
    ),
    Place("megatron.core.transformer.module").called(
        "Float16Module", "wraps it in 16 bits"
    ),
    _TRANSFORMER.called("MLATransformerConfig", "settings with latent attention"),
    _PARALLEL.called(
        "set_defaults_if_not_set_tensor_model_parallel_attributes",
        "marks on parameters",
        "tensor",
    ),
    _SPECS.called(
        "get_gpt_layer_local_spec",
        "a layer of Megatron's local modules",
        "qk_layernorm multi_latent_attention normalization",
    ),
    _SPECS.called(
        "get_gpt_decoder_block_spec", "layers of a model with experts", _BLOCK
    ),
)
# A run's own script, with the Megatron-LM that it is of.
SCRIPT = (
    _LOOP.replaced("pretrain", "trains; replaced to stop a script there"),
    _LOOP.called(
        "setup_model_and_optimizer", "builds the model, then asks for its optimizer"
    ),
    _LOOP.replaced("get_megatron_optimizer", "replaced to stop it there"),
    _TRAINING.replaced("pretrain", "what a script imports"),
    _TRAINING.called("get_args", "the arguments, validated"),
    _INITIALIZE.called(
        "initialize_megatron", "parses arguments", "skip_mpu_initialization"
    ),
    _GROUPS.called(
        "use_mpu_process_groups", "a rank's groups, for scripts that hand them on"
    ),
    _VARIABLES.called("set_args", "whose model is built", "args"),
    _VARIABLES.called("destroy_global_vars", "forgets an earlier script"),
    Place("megatron.core.num_microbatches_calculator").called(
        "destroy_num_microbatches_calculator", "forgets an earlier script"
    ),
    Place("megatron.core.rerun_state_machine").called(
        "destroy_rerun_state_machine", "forgets an earlier script"
    ),
)
