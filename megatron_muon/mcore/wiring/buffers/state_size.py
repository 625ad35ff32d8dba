"""How many elements of Muon's state a rank has: computed at its start, not measured."""

from __future__ import annotations

from megatron_muon.mcore.load_check.models import TrainedModel, every_trained
from megatron_muon.mcore.routing.param_routing import weights, why_adamw


def muon_elements() -> float:
    """A rank's share of its stage's Muon elements, summed over all models that Muon trains.

    It is the mean over the ranks that shard a buffer. No communication.
    """
    return sum(_elements(trained) for trained in every_trained())


def _elements(trained: TrainedModel) -> float:
    stage = trained.stage
    sizes, ranks = stage.sizes, stage.group.size()
    dense, experts = ranks / sizes.tp, ranks / (sizes.expert_tp * sizes.ep)
    total = 0.0
    for weight in weights(trained.model_chunks()):
        trains = weight.param.requires_grad and not weight.is_tied_copy
        if trains and why_adamw(weight, sizes.tp_of(weight), trained.config) is None:
            total += weight.param.numel() / (experts if weight.is_expert else dense)
    return total
