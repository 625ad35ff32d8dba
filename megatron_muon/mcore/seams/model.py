"""What of Megatron's models must be there: a wrapped function, and marks on parameters.

A mark that has another name would be read as one that is not set, without a word.
"""

from megatron_muon.mcore.seams.row import Place, Row

LAYERS = Place("megatron.core.tensor_parallel.layers")
ROWS: tuple[Row, ...] = (
    Place("megatron.core").read("__version__", "which rows hold here"),
    Place("megatron.core.optimizer.qk_clip", since=16).wrapped(
        "clip_qk(model, log_max_only)", "called after each step; clips shards"
    ),
    # --- marks on parameters
    *LAYERS.has(
        tensor_model_parallel="whether TP splits it",
        partition_dim="the dim that TP splits",
        sequence_parallel="its gradient is added up over TP ranks",
        allreduce="False on experts' weights, which have buffers of their own",
    ),
    *Place("megatron.core.models.common.language_module.language_module").has(
        is_embedding_or_output_parameter="an embedding or output: AdamW's",
        shared_embedding="a tied embedding, whose copies need one optimizer",
        shared="the last stage's copy of a tied embedding",
    ),
)
