"""Megatron's process groups that the plugin uses."""

from __future__ import annotations

from megatron_muon.mcore.seams.row import OLDEST, Attribute, Seam, Version

_STATE = "megatron.core.parallel_state"
_GROUPS = "megatron.core.process_groups_config"


def _state(
    name: str, relied_on: str, parameters: tuple[str, ...] = (), since: Version = OLDEST
) -> Seam:
    return Seam(_STATE, name, "called", relied_on, parameters, since)


def _of_collection(name: str, relied_on: str) -> Attribute:
    return Attribute(_GROUPS, "ProcessGroupCollection", name, relied_on, since=(0, 15))


SEAMS = (
    _state(
        "get_tensor_and_data_parallel_group",
        "the ranks of a pipeline stage",
        ("with_context_parallel",),
    ),
    _state("get_tensor_model_parallel_group", "the ranks that share a dense weight"),
    _state("get_expert_tensor_parallel_group", "the ranks that share an expert's weights"),
    _state("get_expert_model_parallel_group", "the ranks that a layer's experts are spread over"),
    _state("get_pipeline_model_parallel_rank", "the number of the pipeline stage"),
    _state("get_expert_model_parallel_rank", "which experts this rank has"),
    _state("get_expert_model_parallel_world_size", "how many ranks share a layer's experts"),
    _state("get_tensor_model_parallel_world_size", "how many ranks share a dense weight"),
    _state("get_expert_tensor_parallel_world_size", "how many ranks share an expert's weights"),
    _state(
        "get_data_parallel_world_size",
        "how many shards a buffer of dense weights has, inside one optimizer instance",
        ("with_context_parallel", "partial_data_parallel"),
        (0, 18),
    ),
    _state(
        "get_expert_data_parallel_world_size",
        "how many shards a buffer of experts' weights has, inside one optimizer instance",
        ("partial_expert_data_parallel",),
        (0, 18),
    ),
)

# A caller may give any object with these attributes; Megatron's own class has these names.
ATTRIBUTES = (
    _of_collection("tp", "the ranks that share a dense weight"),
    _of_collection("expt_tp", "the ranks that share an expert's weights"),
    _of_collection("ep", "the ranks that a layer's experts are spread over"),
    _of_collection("pp", "the pipeline stages"),
    _of_collection("tp_dp_cp", "the ranks of a pipeline stage"),
    _of_collection("dp_cp", "the ranks that shard a buffer of dense weights"),
    _of_collection("intra_dp_cp", "the same ranks, within one optimizer instance"),
    _of_collection("expt_dp", "the ranks that shard a buffer of experts' weights"),
    _of_collection("intra_expt_dp", "the same ranks, within one optimizer instance"),
)
