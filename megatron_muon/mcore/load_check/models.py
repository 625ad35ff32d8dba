"""Which of the models that Muon trains is being saved or loaded, if any."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.load_check.model_settings import Settings, settings_of
from megatron_muon.mcore.load_check.model_table import Table, table_of
from megatron_muon.mcore.wiring.buffers.shards import device_of
from megatron_muon.mcore.wiring.process_groups import Stage
from megatron_muon.mcore.wiring.trained import TrainedModel, any_built, every_trained
from megatron_muon.runtime.collectives import all_gather_numbers, all_gather_texts
from megatron_muon.runtime.consensus import attempt, raise_quoting, together

_vocabulary: int | None = None


class Wanted(IntEnum):
    """A rank's view of a save or load: not of Muon's model, or of it with or without a digest."""

    NOTHING, DIGEST, NO_DIGEST = range(3)


def vocabulary() -> int | None:
    """The run's vocabulary: number of tokens before padding; None if unknown."""
    return _vocabulary


@contextmanager
def with_vocabulary(tokens: int | None) -> Iterator[None]:
    """Set the run's vocabulary: number of tokens before padding; None if unknown."""
    global _vocabulary
    before, _vocabulary = _vocabulary, tokens
    try:
        yield
    finally:
        _vocabulary = before


def owner(sharded_state_dict: Mapping[str, Any]) -> TrainedModel | None:
    """The model of Muon's whose parameters are in the state dict, if any. No communication."""
    if not every_trained():
        return None
    addresses = set(_addresses(sharded_state_dict))
    for trained in reversed(every_trained()):
        for chunk in trained.model_chunks():
            if any(param.data_ptr() in addresses for param in chunk.parameters()):
                return trained
    return None


def _addresses(state: Any) -> Iterator[int]:
    """Addresses of the tensors behind Megatron's ShardedTensors and factories in a state dict."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for each in state:
            yield from _addresses(each)
        return
    data = getattr(state, "data", None)
    if isinstance(data, torch.Tensor) and data.numel() and data.device.type != "meta":
        yield data.data_ptr()


def owner_of_chunks(model_chunks: Sequence[Any]) -> TrainedModel | None:
    """The model of Muon's that has a parameter of these chunks, wrapped in DDP or not, if any."""
    here = {param for chunk in model_chunks for param in chunk.parameters()}
    for trained in reversed(every_trained()):
        for chunk in trained.model_chunks():
            if any(param in here for param in chunk.parameters()):
                return trained
    return None


def wanted_by_all(find: Callable[[], TrainedModel | None]) -> tuple[TrainedModel | None, Wanted]:
    """The result of ``find``, and whether a digest is to be made or checked.

    Every rank of the world calls it.

    Args:
        find: returns the model of Muon's that this rank saves or loads; communicates nothing.

    Raises:
        BaseException: the error that ``find`` raises here.
        RuntimeError: ``find`` raises only on another rank.
    """
    if not any_built():
        return None, Wanted.NOTHING
    trained, error = attempt(find)
    mine = int(Wanted.NOTHING)
    if trained is not None:
        mine = Wanted.DIGEST if trained.config.checkpoint_digest else Wanted.NO_DIGEST
    mine = _FAILED if error is not None else mine
    (most,) = max(all_gather_numbers([mine], None, trained_device(trained)))
    if most == _FAILED:
        raise_quoting(error, None)
    return trained, Wanted(most)


_FAILED = len(Wanted)  # sent in place of a ``Wanted`` by a rank with an error


def trained_device(trained: TrainedModel | None) -> torch.device:
    """The device of the tensors that the world communicates."""
    return device_of(trained.model_chunks() if trained else [])


def local_folder(checkpoint_dir: str, wanted: Wanted) -> Path:
    """A checkpoint's folder.

    Raises:
        NotImplementedError: it is in an object store, and a digest is wanted.
    """
    if "://" in checkpoint_dir and wanted == Wanted.DIGEST:
        raise NotImplementedError(
            f"{checkpoint_dir} is in an object store, where megatron_muon makes and checks no "
            "digest: give --no-muon-checkpoint-digest (checkpoint_digest=False in MuonConfig)"
        )
    return Path(checkpoint_dir)


@dataclass(frozen=True, slots=True)
class Whole:
    """A model over all ranks: ``parameters`` and ``model`` of a digest."""

    table: Table
    settings: Settings


def whole_model(trained: TrainedModel | None) -> Whole:
    """The whole model, merged from the parts of all ranks. Every rank of the world calls it.

    Raises:
        RuntimeError: only another rank has an error.
    """
    own = together(lambda: _own_part(trained), None, trained_device(trained))
    every = [json.loads(text) for text in all_gather_texts(json.dumps(own), None)]
    table: Table = {name: entry for part in every for name, entry in part[0].items()}
    settings: Settings = next((part[1] for part in every if part[1]), {})
    return Whole(table, settings)


def _own_part(trained: TrainedModel | None) -> tuple[Table, Settings]:
    if trained is None:
        return {}, {}
    chunks = trained.model_chunks()
    speaks = _speaks_for_replicas(trained.stage)
    table = table_of(chunks, trained.config, trained.stage) if speaks else {}
    return table, settings_of(chunks)


def _speaks_for_replicas(stage: Stage) -> bool:
    """Whether this rank lists its parameters: those that do have all of a stage's among them."""
    if stage.instance != 0:
        return False
    if stage.ep is None or stage.expert_tp is None:
        return dist.get_rank(stage.group) == 0
    return stage.expert_tp.rank() == 0  # every EP rank has experts of its own
