"""Symbols of Megatron-LM's training scripts, ``megatron.training``, that the plugin
wraps or replaces.

Wrappers of ``wrapped`` rows are in ``megatron_lm.install``; ``megatron_lm.autoload``
has a second one of ``initialize_megatron``.
"""

from megatron_muon.mcore.seams.row import Place

_ARGS = Place("megatron.training.arguments")
CHECKPOINTS = Place("megatron.training.checkpointing")
INITIALIZE = Place("megatron.training.initialize")
LOOP = Place("megatron.training.training")
ROWS = (
    # --- arguments
    _ARGS.wrapped(
        "parse_args(extra_args_provider)", "makes the parser; adds Muon's flags"
    ),
    _ARGS.wrapped(
        "validate_args(args, defaults)", "checks arguments; sees AdamW for Muon"
    ),
    _ARGS.wrapped("_print_args(title, args)", "prints the optimizer as it was given"),
    INITIALIZE.wrapped(
        "initialize_megatron(allow_no_cuda)", "makes the process groups"
    ),
    # --- the training loop
    LOOP.wrapped(
        "get_megatron_optimizer_config(args)", "without Megatron's Muon's", since=16
    ),
    LOOP.wrapped(
        "get_megatron_muon_optimizer(config, model_chunks, "
        "layer_wise_distributed_optimizer)",
        "called for the name muon; builds the plugin's",
        since=16,
        until=17,
    ),
    # --- checkpoints
    CHECKPOINTS.wrapped(
        "generate_state_dict(args)", "arguments that Megatron's tools read"
    ),
    CHECKPOINTS.wrapped(
        "save_checkpoint(iteration, model, optimizer)", "writes a checkpoint"
    ),
    CHECKPOINTS.wrapped(
        "load_checkpoint(ddp_model, optimizer, opt_param_scheduler)",
        "reads a checkpoint; checked first",
    ),
    CHECKPOINTS.replaced(
        "read_metadata(tracker_filename)", "the tracker's iteration, or --ckpt-step"
    ),
)
