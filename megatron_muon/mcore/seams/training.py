"""Symbols of Megatron-LM's training scripts, ``megatron.training``, that the plugin
uses.

Wrappers of ``wrapped`` rows are in ``megatron_lm.install``; ``megatron_lm.autoload``
has a second one of ``initialize_megatron``.
"""

from typing import Any

from megatron_muon.mcore.seams.row import Place
from megatron_muon.mcore.seams.rows import WAY_OUT, megatron_version
from megatron_muon.presence import SeamError

_ARGS = Place("megatron.training.arguments")
_CKPT = Place("megatron.training.checkpointing")
_INITIALIZE = Place("megatron.training.initialize")
_VARIABLES = Place("megatron.training.global_vars")
_LOOP = Place("megatron.training.training")
ROWS = (
    # --- the launcher
    Place("megatron.core.datasets.utils").called(
        "compile_helpers", "compiles the dataset helper, or exits"
    ),
    # --- arguments
    _ARGS.wrapped(
        "parse_args(extra_args_provider)", "makes the parser; adds Muon's flags"
    ),
    _ARGS.wrapped(
        "validate_args(args, defaults)", "checks arguments; sees AdamW for Muon"
    ),
    _ARGS.wrapped("_print_args(title, args)", "prints the optimizer as it was given"),
    _INITIALIZE.wrapped(
        "initialize_megatron(allow_no_cuda)", "makes the process groups"
    ),
    _INITIALIZE.called(
        "parse_args(extra_args_provider, ignore_unknown_args)",
        "parses before initialize_megatron asks for a GPU",
        until=17,
    ),
    Place("megatron.training").called("get_args", "the arguments of the run"),
    _VARIABLES.called(
        "get_tensorboard_writer", "the last rank's SummaryWriter, else None"
    ),
    _VARIABLES.called(
        "get_wandb_writer", "the wandb module on the last rank, else None"
    ),
    # --- the training loop
    _LOOP.wrapped(
        "get_megatron_optimizer_config(args)", "without Megatron's Muon's", since=16
    ),
    _LOOP.wrapped(
        "get_megatron_muon_optimizer(config, model_chunks, "
        "layer_wise_distributed_optimizer)",
        "called for the name muon; builds the plugin's",
        since=16,
        until=17,
    ),
    _LOOP.wrapped(
        "train_step(optimizer)", "a step of training; traced, and the first warned of"
    ),
    # --- checkpoints
    _CKPT.wrapped("generate_state_dict(args)", "arguments that Megatron's tools read"),
    _CKPT.wrapped(
        "save_checkpoint(iteration, model, optimizer)", "writes a checkpoint"
    ),
    _CKPT.wrapped(
        "load_checkpoint(ddp_model, optimizer, opt_param_scheduler)",
        "reads a checkpoint; checked first",
    ),
    _CKPT.called(
        "get_checkpoint_name(checkpoints_path, iteration, release, return_base_dir)",
        "a checkpoint's folder; torch: a rank's file",
    ),
    _CKPT.called(
        "get_distributed_optimizer_checkpoint_name(model_checkpoint_name)",
        "torch: the file of state",
    ),
    _CKPT.called("checkpoint_exists(checkpoints_path)", "whether there is a tracker"),
    _CKPT.replaced(
        "read_metadata(tracker_filename)", "the tracker's iteration, or --ckpt-step"
    ),
    _CKPT.read("_NON_PERSISTENT_CKPT_SUBDIR", "where non-persistent checkpoints are"),
)

# Arguments that are read after Megatron-LM has checked them; the namespace exists only
# then.
ARGUMENTS = (
    # what is loaded and saved, and where
    "save",
    "load",
    "finetune",
    "no_load_optim",
    "override_opt_param_scheduler",
    "use_dist_ckpt",
    "non_persistent_ckpt_type",
    "non_persistent_global_ckpt_dir",
    # how many buckets there are, over how many ranks
    "ddp_num_buckets",
    "ddp_bucket_size",
    "overlap_grad_reduce",
    "world_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "tensor_model_parallel_size",
    "expert_tensor_parallel_size",
    "expert_model_parallel_size",
    "num_distributed_optimizer_instances",
    # the sizes of the first pipeline stage, which that number comes from
    "hidden_size",
    "ffn_hidden_size",
    "kv_channels",
    "num_layers",
    "num_experts",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "moe_ffn_hidden_size",
    "moe_grouped_gemm",
    "moe_layer_freq",
    "swiglu",
    "moe_shared_expert_intermediate_size",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "add_bias_linear",
    "normalization",
    "position_embedding_type",
    "qk_layernorm",
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "decoder_first_pipeline_num_layers",
)


def check_arguments(args: Any) -> None:
    """Refuse, by a SeamError, validated arguments that lack one which this package
    reads.
    """
    missing = [name for name in ARGUMENTS if not hasattr(args, name)]
    if missing:
        raise SeamError(
            f"the arguments of Megatron-LM of core {megatron_version()[0]} have no "
            f"{', '.join(missing)}, which megatron_muon needs. {WAY_OUT}"
        )
