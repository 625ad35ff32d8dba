"""Symbols of Megatron-LM's training scripts, ``megatron.training``, that the plugin uses.

Wrappers of ``wrapped`` rows are in ``megatron_lm.install``; ``megatron_lm.autoload`` has a second
one of ``initialize_megatron``.
"""

from __future__ import annotations

from megatron_muon.mcore.seams.row import NEWEST, OLDEST, Seam, Use, Version

_PACKAGE = "megatron.training"
_ARGUMENTS = "megatron.training.arguments"
_CHECKPOINTING = "megatron.training.checkpointing"
_INITIALIZE = "megatron.training.initialize"
_VARIABLES = "megatron.training.global_vars"
_LOOP = "megatron.training.training"


def _seam(
    module: str,
    name: str,
    use: Use,
    relied_on: str,
    parameters: tuple[str, ...] = (),
    since: Version = OLDEST,
    until: Version = NEWEST,
) -> Seam:
    return Seam(module, name, use, relied_on, parameters, since, until, part="training")


SEAMS = (
    # --- arguments
    _seam(
        _ARGUMENTS,
        "parse_args",
        "wrapped",
        "makes the parser; wrapped to add Muon's flags",
        ("extra_args_provider",),
    ),
    _seam(
        _ARGUMENTS,
        "validate_args",
        "wrapped",
        "checks the arguments; wrapped to check Muon's, and to show it AdamW in place of Muon",
        ("args", "defaults"),
    ),
    _seam(
        _ARGUMENTS,
        "_print_args",
        "wrapped",
        "prints the arguments; wrapped to print the optimizer as it was given",
        ("title", "args"),
    ),
    _seam(
        _INITIALIZE,
        "initialize_megatron",
        "wrapped",
        "makes the process groups; wrapped to compare settings then, and by the patch to let a run "
        "without a GPU parse first",
        ("allow_no_cuda",),
    ),
    _seam(
        _INITIALIZE,
        "parse_args",
        "called",
        "parses before initialize_megatron asks for a GPU",
        ("extra_args_provider", "ignore_unknown_args"),
        until=(0, 17),
    ),
    _seam(_PACKAGE, "get_args", "called", "the arguments of the run"),
    _seam(
        _VARIABLES,
        "get_tensorboard_writer",
        "called",
        "the SummaryWriter of --tensorboard-dir on the last rank, else None",
    ),
    _seam(
        _VARIABLES,
        "get_wandb_writer",
        "called",
        "the wandb module of --wandb-project on the last rank, else None",
    ),
    _seam(_PACKAGE, "get_tokenizer", "called", "the number of tokens before padding"),
    # --- the training loop
    _seam(
        _LOOP,
        "get_megatron_optimizer_config",
        "wrapped",
        "the OptimizerConfig of the arguments; wrapped to leave out settings of Megatron's own "
        "Muon",
        ("args",),
        since=(0, 16),
    ),
    _seam(
        _LOOP,
        "get_megatron_muon_optimizer",
        "wrapped",
        "called by the loop for the name muon; wrapped only there, to build the distributed "
        "optimizer",
        ("config", "model_chunks", "layer_wise_distributed_optimizer"),
        since=(0, 16),
        until=(0, 17),
    ),
    _seam(
        _LOOP,
        "train",
        "wrapped",
        "the training loop; it reads and writes no parameters between a step and the next forward "
        "pass without a forced gather, so wrapped to start gathers within its steps",
        ("optimizer",),
    ),
    _seam(
        _LOOP,
        "train_step",
        "wrapped",
        "a step of training, which the loop looks up; wrapped to trace chosen steps, and to warn "
        "before the first one",
        ("optimizer",),
    ),
    _seam(
        _LOOP,
        "report_theoretical_memory",
        "wrapped",
        "prints the memory of AdamW's state; wrapped to say how much less Muon's is",
        ("args",),
    ),
    # --- checkpoints
    _seam(
        _CHECKPOINTING,
        "generate_state_dict",
        "wrapped",
        "the content of a checkpoint; wrapped to hold arguments that Megatron's tools can read",
        ("args",),
    ),
    _seam(
        _CHECKPOINTING,
        "save_checkpoint",
        "wrapped",
        "writes a checkpoint, then the tracker that names it; wrapped to write the digest",
        ("iteration", "model", "optimizer"),
    ),
    _seam(
        _CHECKPOINTING,
        "load_checkpoint",
        "wrapped",
        "reads a checkpoint; wrapped to check it first",
        ("ddp_model", "optimizer", "opt_param_scheduler"),
    ),
    _seam(
        _CHECKPOINTING,
        "get_checkpoint_name",
        "called",
        "a checkpoint's folder; in the format torch a rank's file",
        ("checkpoints_path", "iteration", "release", "return_base_dir"),
    ),
    _seam(
        _CHECKPOINTING,
        "get_distributed_optimizer_checkpoint_name",
        "called",
        "format torch: the file of the optimizer's state beside the model's",
        ("model_checkpoint_name",),
    ),
    _seam(
        _CHECKPOINTING,
        "checkpoint_exists",
        "called",
        "whether there is a tracker",
        ("checkpoints_path",),
    ),
    _seam(
        _CHECKPOINTING,
        "read_metadata",
        "replaced",
        "the iteration that a tracker names; replaced where --ckpt-step names another",
        ("tracker_filename",),
    ),
    _seam(
        _CHECKPOINTING,
        "_NON_PERSISTENT_CKPT_SUBDIR",
        "read",
        "where non-persistent checkpoints are",
    ),
)

# Arguments that are read after Megatron-LM has checked them; the namespace exists only then.
ARGUMENTS = {
    "save": "the folder to save into",
    "load": "the folder to load from",
    "use_dist_ckpt": "whether dist_checkpointing writes, or torch.save",
    "non_persistent_ckpt_type": "whether there are non-persistent checkpoints, and their kind",
    "non_persistent_global_ckpt_dir": "the folder of non-persistent checkpoints",
    "finetune": "whether the optimizer's state is loaded",
    "no_load_optim": "whether the optimizer's state is loaded",
    "override_opt_param_scheduler": "whether the run's own rates hold after a load",
    "ddp_num_buckets": "how many buckets the grad buffers have",
    "ddp_bucket_size": "how large they are",
    "overlap_grad_reduce": "whether there is more than one",
    "virtual_pipeline_model_parallel_size": "how many model chunks the buckets are divided over",
    **dict.fromkeys(
        (
            *("world_size", "pipeline_model_parallel_size", "tensor_model_parallel_size"),
            *("expert_tensor_parallel_size", "expert_model_parallel_size"),
            "num_distributed_optimizer_instances",
        ),
        "how many ranks shard a buffer, which the number of buckets comes from",
    ),
    **dict.fromkeys(
        (
            *("hidden_size", "ffn_hidden_size", "kv_channels", "num_layers", "num_experts"),
            *("num_attention_heads", "num_query_groups", "group_query_attention"),
            *("moe_ffn_hidden_size", "moe_grouped_gemm", "moe_layer_freq", "swiglu"),
            *("moe_shared_expert_intermediate_size", "multi_latent_attention"),
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            *("vocab_size", "untie_embeddings_and_output_weights"),
            "decoder_first_pipeline_num_layers",
        ),
        "the sizes of the first pipeline stage, which the number of buckets comes from",
    ),
}
# Arguments that are read before that, or that only some versions have.
UNCHECKED_ARGUMENTS = {
    "optimizer": "the first thing that the wrapper of validate_args reads",
    "use_distributed_optimizer": "read before Megatron's checks, which without it fail on some "
    "releases",
    "dump_param_to_param_group_map": "with 0.16 and 0.17, passed on to get_megatron_optimizer",
    "perform_rl_step": "read only if the namespace has it",
    "yaml_cfg": "read only if the namespace has it",
    "curr_iteration": "the number of steps before this one, read within the training loop",
    "use_pytorch_profiler": "read only if the namespace has it",
    "ckpt_step": "read only if the namespace has it",
    "pretrained_checkpoint": "read only if the namespace has it",
}
