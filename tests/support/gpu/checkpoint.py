"""Ranks that save, load and switch. Gradients are written, so that bits can be
compared.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

import megatron_muon
from megatron_muon.lab.bench.step.build import Built
from megatron_muon.lab.bench.step.measure import optimizers_of
from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.runtime import collectives
from support.gpu.model import built_on_rank, fill, named_params

CLAIMS = (
    "the killed save is refused",
    "a load brings back every bit",
    "the run goes on with the bits of one that never stopped",
    "AdamW goes on from Muon's checkpoint",
    "Muon goes on from AdamW's checkpoint",
)
_BEFORE, _AFTER = 2, 2  # steps before and after the first save
_METADATA = {
    "distrib_optim_sharding_type": WHOLE_WEIGHTS,
    "chained_optim_avoid_prefix": True,
}


def save_and_be_killed(argument: dict[str, Any]) -> None:
    """Take steps, save, take another, and have rank 0 killed as its save writes
    metadata.
    """
    built = _built(argument, "muon-contiguous")
    _steps(built, 0, _BEFORE)
    megatron_muon.install()  # which checks every save
    _save(built, Path(argument["folder"], "first"))
    _steps(built, _BEFORE, 1)
    if dist.get_rank() == 0:
        sys.addaudithook(_kill_at_metadata)
    _save(built, Path(argument["folder"], "second"))


def _kill_at_metadata(event: str, args: tuple[Any, ...]) -> None:
    """End this process at once as it opens a file of metadata for writing."""
    if event != "open" or not isinstance(args[0], (str, os.PathLike)):
        return
    name = os.path.basename(os.fspath(args[0]))
    writes = args[2] & (os.O_WRONLY | os.O_RDWR)
    if writes and name.startswith((".metadata", "metadata.json")):
        os.kill(os.getpid(), signal.SIGKILL)


def load_and_switch(argument: dict[str, Any]) -> dict[str, str]:
    """For each of ``CLAIMS`` ``ok``, or the fault on this rank."""
    folder = Path(argument["folder"])
    first, second = folder / "first", folder / "second"
    whole = _built(argument, "muon-contiguous")
    _steps(whole, 0, _BEFORE)
    saved = _checksums(whole)
    _steps(whole, _BEFORE, _AFTER)
    megatron_muon.install()
    again = _built(argument, "muon-contiguous")
    megatron_muon.install()
    refused = _error_of(lambda: _load(again, second))
    _load(again, first)
    loaded = _checksums(again)
    _steps(again, _BEFORE, _AFTER)
    is_refused = "is not complete" in refused or "not a" in refused
    faults = (
        "ok" if is_refused else refused or "it was loaded",
        _same(saved, loaded),
        _same(_checksums(whole), _checksums(again)),
        _from_muon(argument, first),
        _from_adamw(argument, folder / "adamw"),
    )
    return dict(zip(CLAIMS, faults, strict=True))


def _from_muon(argument: dict[str, Any], folder: Path) -> str:
    adamw = _built(argument, "adamw")
    megatron_muon.install()
    _load(adamw, folder, megatron_muon.reading_muon(adamw.optimizer, folder))
    saved = _built(argument, "muon-contiguous")
    _steps(saved, 0, _BEFORE)
    return _goes_on(saved, adamw)


def _from_adamw(argument: dict[str, Any], folder: Path) -> str:
    adamw = _built(argument, "adamw")
    _steps(adamw, 0, _BEFORE)
    megatron_muon.install()
    _save(adamw, folder)
    muon = _built(argument, "muon-contiguous")
    megatron_muon.install()
    _load(muon, folder, megatron_muon.reading_adamw(muon.optimizer, "momentum"))
    return _goes_on(adamw, muon)


def _goes_on(saved: Built, loaded: Built) -> str:
    """The run that was loaded has the other's main parameters and takes a step."""
    fault = _same(_checksums(saved, "main"), _checksums(loaded, "main"))
    if fault != "ok":
        return fault
    return _error_of(lambda: _steps(loaded, _BEFORE, 1)) or "ok"


# --- a rank's model -------------------------------------------------------------------


def _built(argument: dict[str, Any], row: str) -> Built:
    megatron_muon.uninstall()  # ``build`` installs it where its row needs it
    built = _with_weights(built_on_rank(argument["settings"], row))
    if row == "adamw":
        _count_steps(built)
    return built


def _count_steps(built: Built) -> None:
    """Without Transformer Engine and Apex, Megatron loads no AdamW that has not taken a
    step.
    """
    for part in optimizers_of(built.optimizer):
        if isinstance(part.optimizer, torch.optim.AdamW):
            part.init_state_fn(part.optimizer)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


@torch.no_grad()
def _with_weights(built: Built) -> Built:
    for key, param in named_params(built.chunks):
        fill(param, f"weight {key} {_tp_rank(param)}", 0.02)
    built.optimizer.reload_model_params()
    return built


def _steps(built: Built, start: int, count: int) -> None:
    """Steps of gradients that are known by number; every DP rank has them whole and
    reduced.
    """
    for step in range(start, start + count):
        for chunk in built.chunks:
            chunk.zero_grad_buffer()
        for key, param in named_params(built.chunks):
            fill(param.main_grad, f"gradient {key} {_tp_rank(param)} {step}", 0.02)
        successful, _, _ = built.optimizer.step()
        if not successful:
            raise RuntimeError(f"Megatron skipped step {step}")


def _tp_rank(param: Any) -> int:
    from megatron.core import parallel_state

    cut = getattr(param, "tensor_model_parallel", False)
    return parallel_state.get_tensor_model_parallel_rank() if cut else 0


def _checksums(built: Built, *kinds: str) -> dict[str, int]:
    """CRC-32 of every parameter, main parameter and tensor of optimizer state, by
    name.
    """
    return {
        name: zlib.crc32(
            tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
        )
        for name, tensor in _tensors(built)
        if not kinds or name.split()[0] in kinds
    }


def _tensors(built: Built) -> Iterator[tuple[str, Tensor]]:
    names = {param: key for key, param in named_params(built.chunks)}
    for param, key in names.items():
        yield f"weight {key}", param.data
    for part in optimizers_of(built.optimizer):
        if part.is_stub_optimizer:
            continue
        for param, shard in owned_shards(part):
            yield f"main {names[param]}", shard
            for kind, tensor in part.optimizer.state[shard].items():
                if isinstance(tensor, Tensor) and tensor.shape == shard.shape:
                    yield f"{kind} {names[param]}", tensor


# --- its checkpoints ------------------------------------------------------------------


def _save(built: Built, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    folder.mkdir(exist_ok=True)
    device = torch.device(torch.cuda.current_device())
    collectives.all_gather_numbers([0], None, device)  # no rank is ahead of the folder
    dist_checkpointing.save(_sharded(built, is_loading=False), str(folder))


def _load(
    built: Built, folder: Path, reading: AbstractContextManager[None] | None = None
) -> None:
    from megatron.core import dist_checkpointing

    with reading or nullcontext():
        loaded = dist_checkpointing.load(_sharded(built, is_loading=True), str(folder))
        _gpt(built).load_state_dict(loaded["model"])
        built.optimizer.load_state_dict(loaded["optimizer"])


def _sharded(built: Built, *, is_loading: bool) -> dict[str, Any]:
    state = {"model": _gpt(built).sharded_state_dict()}
    form: dict[str, Any] = {"metadata": _METADATA}
    if (
        "metadata"
        not in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    ):
        form = {"sharding_type": WHOLE_WEIGHTS}  # before core 0.14
    state["optimizer"] = built.optimizer.sharded_state_dict(state, is_loading, **form)
    return state


def _gpt(built: Built) -> Any:
    (chunk,) = built.chunks
    return chunk.module.module  # in DDP, in Float16Module


# --- verdicts -------------------------------------------------------------------------


def _error_of(action: Callable[[], None]) -> str:
    """The error that it raises, in words; empty if none."""
    try:
        action()
    except BaseException as error:  # torch's error of checkpoints is no Exception
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _same(one: dict[str, int], other: dict[str, int]) -> str:
    if one.keys() != other.keys():
        return f"other names: {sorted(one.keys() ^ other.keys())[:3]}"
    bad = [name for name in one if one[name] != other[name]]
    return f"{len(bad)} of {len(one)} differ, the first is {bad[0]}" if bad else "ok"
