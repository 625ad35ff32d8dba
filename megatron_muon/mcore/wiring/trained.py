"""The models that Muon trains, noted when their optimizers are built: a save or load asks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.mcore.routing.routes import routes_of
from megatron_muon.mcore.wiring.process_groups import Stage
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that Muon trains, as this rank has it; a process may have built several."""

    chunks: tuple[weakref.ref[Any], ...]
    config: MuonConfig
    stage: Stage

    def model_chunks(self) -> list[Any]:
        return [chunk for ref in self.chunks if (chunk := ref()) is not None]


_trained: weakref.WeakKeyDictionary[Any, TrainedModel] = weakref.WeakKeyDictionary()
_any_built = False


def remember(model_chunks: Sequence[Any], config: MuonConfig, stage: Stage) -> None:
    """Note a model that Muon trains. Every rank of the world calls it."""
    global _any_built
    refs = tuple(weakref.ref(chunk) for chunk in model_chunks)
    _trained[model_chunks[0]] = TrainedModel(refs, config, stage)
    _any_built = True


def forget() -> None:
    """Forget all models, as in a new process. Every rank of the world calls it."""
    global _any_built
    _trained.clear()
    _any_built = False


def every_trained() -> list[TrainedModel]:
    """The models that Muon trains on this rank."""
    return list(_trained.values())


def any_built() -> bool:
    """Whether one was built; the same on all ranks. While not, saves and loads do not communicate.

    It stays so where the models of a rank are gone.
    """
    return _any_built


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
