"""Megatron's process groups that the plugin uses."""

from megatron_muon.mcore.seams.row import Place

_STATE = Place("megatron.core.parallel_state")
# A caller may give any object with these attributes; Megatron's own class has these names.
_GROUPS = Place("megatron.core.process_groups_config", "ProcessGroupCollection", since=(0, 15))
_STAGE, _TP, _EXPERT_TP = "the ranks of a stage", "who shares a weight", "who shares an expert"
_EP = "the ranks that a layer's experts are spread over"
_SHARDS = "how many shards a grad buffer has, inside one optimizer instance"
_CP = "with_context_parallel"
ROWS = (
    _STATE.called("get_tensor_and_data_parallel_group", _STAGE, _CP),
    _STATE.called("get_tensor_model_parallel_group", _TP),
    _STATE.called("get_expert_tensor_parallel_group", _EXPERT_TP),
    _STATE.called("get_expert_model_parallel_group", _EP),
    _STATE.called("get_pipeline_model_parallel_rank", "the number of the pipeline stage"),
    _STATE.called("get_expert_model_parallel_rank", "which experts this rank has"),
    _STATE.called("get_expert_model_parallel_world_size", _EP),
    _STATE.called("get_tensor_model_parallel_world_size", _TP),
    _STATE.called("get_expert_tensor_parallel_world_size", _EXPERT_TP),
    _STATE.called(
        "get_data_parallel_world_size", _SHARDS, f"{_CP} partial_data_parallel", since=(0, 18)
    ),
    _STATE.called(
        "get_expert_data_parallel_world_size",
        _SHARDS,
        "partial_expert_data_parallel",
        since=(0, 18),
    ),
    _GROUPS.has("tp", _TP),
    _GROUPS.has("expt_tp", _EXPERT_TP),
    _GROUPS.has("ep", _EP),
    _GROUPS.has("pp", "the pipeline stages"),
    _GROUPS.has("tp_dp_cp", _STAGE),
    _GROUPS.has("dp_cp", "the ranks that shard a buffer of dense weights"),
    _GROUPS.has("intra_dp_cp", "the same ranks, within one optimizer instance"),
    _GROUPS.has("expt_dp", "the ranks that shard a buffer of experts' weights"),
    _GROUPS.has("intra_expt_dp", "the same ranks, within one optimizer instance"),
)
