"""The models that Muon trains, noted when their optimizers are built, to find a save's
model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_muon.mcore.host.process_groups import Chunks, Stage
from megatron_muon.mcore.host.shards import device_of
from megatron_muon.runtime.collectives import all_gather_numbers
from megatron_muon.settings.config import MuonConfig


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that Muon trains, as this rank has it; a process may have built
    several.
    """

    chunks: tuple[weakref.ref[Any], ...]
    config: MuonConfig
    stage: Stage

    def model_chunks(self) -> list[Any]:
        return [chunk for ref in self.chunks if (chunk := ref()) is not None]


_trained: weakref.WeakKeyDictionary[Any, TrainedModel] = weakref.WeakKeyDictionary()
# the same on all ranks: while False, saves and loads do not communicate
_any_built = False


def remember(model_chunks: Chunks, config: MuonConfig, stage: Stage) -> None:
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


def owner(state: Any) -> TrainedModel | None:
    """The model of Muon's, if any, of a sharded state dict or of model chunks;
    local.
    """
    addresses = set(_addresses(state)) if _trained else set()
    for trained in reversed(list(_trained.values())):
        if not addresses.isdisjoint(_addresses(trained.model_chunks())):
            return trained
    return None


def _addresses(state: Any) -> Iterator[int]:
    """Addresses of parameters, or of the tensors behind Megatron's ShardedTensors and
    factories.
    """
    if isinstance(state, Mapping):
        state = list(state.values())
    elif isinstance(state, Module):
        state = list(state.parameters())
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _addresses(item)
        return
    data = getattr(state, "data", None)
    if isinstance(data, Tensor) and data.device.type != "meta" and data.data_ptr():
        yield data.data_ptr()  # 0 where it has no memory


def device_of_trained(trained: TrainedModel | None) -> torch.device:
    """The device of what this rank communicates for a save or a load."""
    return device_of(trained.model_chunks() if trained else [])


def digest_wanted(trained: TrainedModel | None) -> bool | None:
    """Whether to write or check a digest; None if Muon trains no rank's model.

    Every rank calls it, with its ``owner``. One rank that wants no digest decides.
    """
    if not _any_built:
        return None
    wanted = [trained.config.checkpoint_digest] if trained else []
    own = [True in wanted, False in wanted]
    votes = all_gather_numbers(own, None, device_of_trained(trained))
    if any(against for _, against in votes):
        return False
    return any(for_it for for_it, _ in votes) or None
