"""Reading checkpoints of AdamW, or of Megatron's own Muon, into Muon; and who wrote one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.fp8_utils import is_float8tensor

from megatron_muon.mcore.checkpoint import read
from megatron_muon.mcore.checkpoint.interop import foreign
from megatron_muon.mcore.checkpoint.param_groups import RECORD
from megatron_muon.mcore.checkpoint.read import Unknown
from megatron_muon.mcore.checkpoint.state import FromAdamW
from megatron_muon.mcore.checkpoint.torch_dist import (
    METADATA,
    Metadata,
    Shards,
    common,
    read_metadata,
)
from megatron_muon.mcore.load_check.regular_files import entries
from megatron_muon.mcore.wiring.buffers.shards import device_of, owned_shards
from megatron_muon.runtime.consensus import together

Writer = Literal["muon", "adamw", "none"]
_OPTIMIZERS = re.compile(r"(chained_\d+\.)*optimizer\.")


@contextmanager
def reading_adamw(optimizer: Any, momentum: FromAdamW) -> Iterator[None]:
    """Let the optimizer load a checkpoint of AdamW's DistributedOptimizer inside the ``with``.

    It takes over main parameters, steps, groups, and both moments of AdamW's remaining parameters.
    Muon's momentum M is Σ μ^k g where Adam's first moment is (1-β1) Σ β1^k g. At its end it checks
    that main parameters round to the model's, so load the model first.

    Args:
        optimizer: the chain that ``get_megatron_optimizer`` has returned. Every rank of the world
            calls this.
        momentum: ``momentum``: M starts as exp_avg / (1-β1), by the β1 of the checkpoint;
            ``fresh``: at zero. ``sum``: as exp_avg, which is Muon's momentum already (Moonshot's
            proof of concept: see ``checkpoint.foreign``).

    Raises:
        ValueError: a main parameter does not round to the model's weight, or with ``sum`` the other
            optimizer updated a weight before; names one.
        RuntimeError: only another rank has an error.
    """
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    for part in parts:
        part.from_adamw, part.other_owner = momentum, []
    try:
        yield
    finally:
        for part in parts:
            part.from_adamw = None
    errors = (_strange_main_params(part, "AdamW") or _other_owner(part) for part in parts)
    device = device_of(optimizer.chained_optimizers[0].model_chunks)
    together(lambda: _raise_first(errors), None, device)


@contextmanager
def reading_megatron_muon(optimizer: Any, folder: str | Path) -> Iterator[None]:
    """Let the optimizer load a torch_dist checkpoint of Megatron's own Muon inside the ``with``.

    It takes over main parameters, momentum, AdamW's moments, steps and groups, at any topology,
    since the checkpoint has whole weights. The format that the run itself saves in does not matter.
    A momentum coefficient that differs is printed, as other settings are. At its end it checks
    that main parameters round to the model's, so load the model first.

    Args:
        optimizer: the chain that ``get_megatron_optimizer`` has returned. Every rank of the world
            calls this.
        folder: the checkpoint's folder, that of one iteration.

    Raises:
        ValueError: the checkpoint is not of Megatron's own Muon, or a main parameter does not round
            to the model's weight.
        RuntimeError: only another rank has an error.
    """
    device = device_of(optimizer.chained_optimizers[0].model_chunks)
    source = together(lambda: _source(Path(folder), optimizer), None, device)
    parts = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    optimizer.source = source
    for part in parts:
        part.main_is_weight = source.is_fp32
    try:
        yield
    finally:
        optimizer.source = None
        for part in parts:
            part.main_is_weight = False
    strange = (_strange_main_params(part, "Megatron's own Muon") for part in parts)
    together(lambda: _raise_first(strange), None, device)


def _raise_first(errors: Iterable[Exception | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


def _source(folder: Path, optimizer: Any) -> foreign.Source:
    writer = foreign_writer(folder)
    if writer is not None:
        foreign.refuse(writer)
    if writer != "megatron":
        raise ValueError(f"{folder} is no checkpoint of Megatron's own Muon in torch_dist")
    states = _states(folder)
    _require_plain_groups(folder, states)
    source = foreign.Source(_keys(folder), states)
    if source.is_fp32 and (optimizer.config.bf16 or optimizer.config.fp16):
        raise ValueError(
            f"{folder} is of an fp32 model, whose weights are its main parameters; this run would "
            "read them rounded: load it in fp32 and save it, or load the model alone "
            "(--no-load-optim)"
        )
    return source


def _require_plain_groups(folder: Path, states: list[dict[Any, Any]]) -> None:
    """Refuse groups with objects that are no plain values, since a file's objects are not built."""
    for group in foreign.groups_of(states):
        for key, value in group.items():
            if isinstance(value, Unknown):
                raise ValueError(f"{folder}: a parameter group's {key} is {value}, no plain value")


def writer_of(folder: str | Path) -> Writer:
    """The optimizer whose state a checkpoint has; no communication.

    Args:
        folder: the folder of one iteration, or the one that ``dist_checkpointing.save`` was given.

    Raises:
        FileNotFoundError: there is no checkpoint.
    """
    if has_record(folder):
        return "muon"
    return "adamw" if _states(Path(folder)) or _objects(Path(folder)) else "none"


def foreign_writer(folder: str | Path) -> foreign.Writer | None:
    """The other Muon that has written a checkpoint, if any: see ``checkpoint.foreign``."""
    folder = Path(folder)
    keys = _objects(folder)
    states = _states(folder)
    if any(".optimizer/" in key for key in keys):  # each model-parallel rank's groups
        states = [*states, {"optimizer": record_of(folder, "optimizer")}]
    files = [entry.name for entry in entries(folder)] if folder.is_dir() else []
    return foreign.writer_of(keys, states, files)


def record_of(folder: str | Path, key: str = RECORD) -> dict[str, Any]:
    """The dict saved under a key beside the optimizer's groups; no communication.

    Args:
        folder: as in ``writer_of``.
        key: its key; by default that of the record of Muon's settings.

    Raises:
        KeyError: the checkpoint has nothing under that key.
        ValueError: the checkpoint is damaged; names the file or the key.
    """
    folder = Path(folder)
    for state in _states(folder):
        if key in state:
            return _record(folder, key, state[key])
    name = next((name for name in _objects(folder) if f".{key}/" in name), None)
    if name is None:
        raise KeyError(f"{folder} has no {key}")
    with _naming(folder, name):
        saved = Shards(folder, _metadata(folder)).object(name)
    return _record(folder, key, saved)


def _record(folder: Path, key: str, saved: Any) -> dict[str, Any]:
    if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
        raise ValueError(f"{folder}: {key} is damaged: it is a {type(saved).__name__}")
    return saved


@contextmanager
def _naming(folder: Path, part: str) -> Iterator[None]:
    """Add the file's path to errors about its damaged content."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder / part} cannot be read: {error}") from error


def has_record(folder: str | Path, key: str = RECORD) -> bool:
    """Whether ``record_of`` finds a dict."""
    folder = Path(folder)
    beside = any(key in state for state in _states(folder))
    return beside or any(f".{key}/" in name for name in _objects(folder))


def _objects(folder: Path) -> list[str]:
    """The optimizer's keys in torch_dist."""
    return [key for key in _keys(folder) if _OPTIMIZERS.match(key)]


def _keys(folder: Path) -> list[str]:
    """Keys of all tensors and objects in torch_dist; else empty."""
    return list(_metadata(folder).entries)


def _metadata(folder: Path) -> Metadata:
    """The metadata of torch_dist; empty in other formats."""
    if not (folder / METADATA).exists():
        return Metadata({}, {})
    with _naming(folder, METADATA):
        return read_metadata(folder)


def _states(folder: Path) -> list[dict[Any, Any]]:
    """The state dicts of a chain of optimizers, without the parts that differ between ranks."""
    if (folder / METADATA).exists():
        metadata = _metadata(folder)
        with _naming(folder, "common.pt"):
            saved = common(folder, metadata)
    else:
        files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
        if not files:
            raise FileNotFoundError(f"{folder} has no checkpoint in it")
        with _naming(folder, str(files[0].relative_to(folder))):
            saved = read.load(files[0])
            if not isinstance(saved, dict):
                raise ValueError(f"it holds a {type(saved).__name__}, not a dict")
    return foreign.states_of(saved.get("optimizer"))


def _other_owner(part: Any) -> ValueError | None:
    if not part.other_owner:
        return None
    return ValueError(
        f"{part.other_owner[0]} was the other optimizer's in the checkpoint: set muon_include and "
        "muon_exclude of MuonConfig (in Megatron-LM --muon-include and --muon-exclude) as it was "
        "there, or load the model alone (--no-load-optim)"
    )


def _strange_main_params(part: Any, whose: str) -> ValueError | None:
    for param, shard in owned_shards(part):
        here = part._get_model_param_range_map(param)["param"]
        if not _rounds_to(shard.detach(), param.detach(), slice(here.start, here.end)):
            return ValueError(
                f"the main parameter of {part._name_of[param]} that {whose}'s checkpoint has does "
                "not round to the model's weight: load the model's weights before the optimizer. "
                "(fully_reshardable of Megatron 0.15 to 0.19 saves shifted optimizer state where "
                "there are several padded buckets; such a checkpoint has lost it: load the model "
                "alone, in Megatron-LM by --no-load-optim)"
            )
    return None


def _rounds_to(shard: torch.Tensor, model: torch.Tensor, here: slice) -> bool:
    """Whether an fp32 shard rounds to that part of the model's weight.

    A weight in fp8 was rounded by a scale that may have changed since. e4m3 has three bits after
    the leading one, and steps of 2^-9 at the lower end. Each of two roundings may be half a step
    off.
    """
    if not is_float8tensor(model):
        weight = model.view(-1)[here]
        return torch.equal(shard.to(weight.dtype), weight)
    weight = model.dequantize().float().view(-1)[here]
    step = 2.0**-9 * model._scale_inv.max()  # type: ignore[attr-defined]
    return bool(((shard - weight).abs() <= 2.0**-3 * shard.abs() + step).all())
