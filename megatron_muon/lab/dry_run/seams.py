"""What builds a model and its ranks without memory: ``routes``, ``plan`` and ``bench``
check it.
"""

from megatron_muon.mcore.seams.row import Place
from megatron_muon.mcore.seams.training import INITIALIZE, LOOP

STATE = Place("megatron.core.parallel_state")
_SPECS = Place("megatron.core.models.gpt.gpt_layer_specs")
_TRAINING = Place("megatron.training")
VARIABLES = Place("megatron.training.global_vars")
ROWS = (
    # --- ranks
    STATE.called(
        "initialize_model_parallel(context_parallel_size, expert_model_parallel_size, "
        "order, create_gloo_process_groups, num_distributed_optimizer_instances, "
        "expert_tensor_parallel_size)",
        "makes the process groups of a rank, over groups that do nothing",
    ),
    STATE.called("destroy_model_parallel", "forgets those groups"),
    STATE.replaced("create_group(ranks)", "skips groups that the rank is not in"),
    STATE.called(
        "RankGenerator(tp, ep, dp, pp, cp, order)", "which ranks are in which group"
    ),
    STATE.called("RankGenerator.get_ranks(token)", "the groups of a kind"),
    STATE.called("is_pipeline_first_stage(ignore_virtual)", "who has the embedding"),
    STATE.called("is_pipeline_last_stage(ignore_virtual)", "who has the output"),
    STATE.called(
        "set_virtual_pipeline_model_parallel_rank", "which chunk is built", until=12
    ),
    STATE.called(
        "get_data_parallel_world_size(with_context_parallel)", "shards of a buffer"
    ),
    Place("megatron.core.tensor_parallel.random").called(
        "model_parallel_cuda_manual_seed(seed)",
        "seeds for the initialization of weights",
    ),
    Place("torch.testing._internal.distributed.fake_pg").called(
        "FakeStore", "process groups that do nothing"
    ),
    Place("torch.cuda").replaced("current_device", "the meta device"),
    # --- a GPT
    Place("megatron.core.models.gpt").called(
        "GPTModel(config, pre_process)", "the model"
    ),
    Place("megatron.core.transformer.module").called(
        "Float16Module", "wraps it in 16 bits"
    ),
    Place("megatron.core.transformer").called(
        "MLATransformerConfig", "settings with latent attention"
    ),
    Place("megatron.core.tensor_parallel").called(
        "set_defaults_if_not_set_tensor_model_parallel_attributes(tensor)",
        "marks on parameters",
    ),
    _SPECS.called(
        "get_gpt_layer_local_spec(qk_layernorm, multi_latent_attention, normalization)",
        "a layer of Megatron's local modules",
    ),
    _SPECS.called(
        "get_gpt_decoder_block_spec(config, use_transformer_engine, normalization)",
        "layers of a model with experts",
    ),
)
# A run's own script, with the Megatron-LM that it is of.
SCRIPT = (
    LOOP.replaced("pretrain", "trains; replaced to stop a script there"),
    LOOP.called(
        "setup_model_and_optimizer", "builds the model, then asks for its optimizer"
    ),
    LOOP.replaced("get_megatron_optimizer", "replaced to stop it there"),
    _TRAINING.replaced("pretrain", "what a script imports"),
    _TRAINING.called("get_args", "the arguments, validated"),
    INITIALIZE.called(
        "initialize_megatron(skip_mpu_initialization)", "parses arguments"
    ),
    Place(
        "megatron.core.process_groups_config", "ProcessGroupCollection", since=16
    ).called(
        "use_mpu_process_groups", "a rank's groups, for scripts that hand them on"
    ),
    VARIABLES.called("set_args(args)", "whose model is built"),
    VARIABLES.called("destroy_global_vars", "forgets an earlier script"),
    Place("megatron.core.num_microbatches_calculator").called(
        "destroy_num_microbatches_calculator", "forgets an earlier script"
    ),
    Place("megatron.core.rerun_state_machine").called(
        "destroy_rerun_state_machine", "forgets an earlier script"
    ),
)
