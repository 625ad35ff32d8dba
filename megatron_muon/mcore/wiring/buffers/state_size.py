"""How many elements of Muon's state a rank has: computed at its start, not measured."""

from __future__ import annotations

from megatron_muon.mcore.load_check.models import TrainedModel, every_trained
from megatron_muon.mcore.routing.routes import routes_of


def muon_elements() -> float:
    """A rank's share of its stage's Muon elements, summed over all models that Muon trains.

    It is the mean over the ranks that shard a buffer. No communication.
    """
    return sum(map(_elements, every_trained()))


def _elements(trained: TrainedModel) -> float:
    stage = trained.stage
    sizes, ranks = stage.sizes, stage.group.size()
    dense, experts = ranks / sizes.tp, ranks / (sizes.expert_tp * sizes.ep)
    total = 0.0
    for route in routes_of(trained.model_chunks(), sizes, trained.config):
        if route.muon is not None and not route.weight.is_tied_copy:
            total += route.weight.param.numel() / (experts if route.weight.is_expert else dense)
    return total
