"""Save and load a tiny GPT with its optimizer as Megatron-LM does, in each of
Megatron's formats.

The functions run on ranks. A format is ``torch`` (Megatron-LM's old one: a file of each
model parallel rank, written by its first DP rank, with the optimizer's tensors in a
second one) or the name of a sharding type of torch_dist.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import reading_muon
from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw
from support.installed import VERSION
from support.models.gpt import (
    Built,
    Case,
    Topology,
    held,
    start,
    stepped,
    take_step,
    take_steps,
)
from support.ranks import error_of

OPTIONS: dict[str, Any] = {}  # of Megatron's save and load


def formats() -> list[str]:
    """Those that Megatron-LM of the installed core writes, its default of torch_dist
    first.
    """
    if VERSION >= (0, 15):
        return [
            "dp_reshardable",
            "fully_reshardable",
            "dp_zero_gather_scatter",
            "torch",
        ]
    return ["dp_zero_gather_scatter", "fully_sharded_model_space", "torch"]


# the one that any other topology can load
(RESHARDABLE,) = {"fully_reshardable", "fully_sharded_model_space"} & {*formats()}


def _as_in_its_day() -> None:
    """Give an old Megatron two functions of numpy 1 and torch 2.6, without which it
    cannot save.
    """
    if VERSION < (0, 15) and not hasattr(numpy, "product"):
        numpy.product = numpy.prod
    if VERSION < (0, 13):
        from megatron.core.dist_checkpointing.strategies import (
            filesystem_async as writer,
        )
        from torch.distributed.checkpoint import filesystem

        torch_save = filesystem.SerializationFormat.TORCH_SAVE
        writer._write_item = partial(
            filesystem._write_item, serialization_format=torch_save
        )


def _number_saves_from_zero() -> None:
    """Megatron numbers a process's saves and compares; workers have been in other
    worlds before.
    """
    if VERSION < (0, 15):
        from megatron.core.dist_checkpointing.strategies import base

        base.async_calls = base.AsyncCallsQueue()


def save(
    built: Built,
    folder: str | Path,
    format: str,
    parallel: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Write the model and its optimizer into a folder, which is made if it is missing.

    As --ckpt-fully-parallel-save does; ``meanwhile`` processes of their own write
    (--async-save).
    """
    folder = str(folder)
    os.makedirs(folder, exist_ok=True)
    if format == "torch":
        assert not parallel and meanwhile is None, "that is torch_dist's"
        return _save_torch(built, folder)
    from megatron.core import dist_checkpointing

    _as_in_its_day()
    state = sharded(built, format, is_loading=False)
    if built.case.fp8:  # a GPU's copy to the host dequantizes, and here there is none
        from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

        force_all_tensors_to_non_fp8(state)
    strategy = _in_parallel("Save", folder) if parallel else None
    if meanwhile is None:
        return write(state, folder, strategy)
    _number_saves_from_zero()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    calls = AsyncCallsQueue()
    calls.schedule_async_request(
        dist_checkpointing.save(
            state, folder, strategy, async_sharded_save=True, **OPTIONS
        )
    )
    meanwhile()
    calls.maybe_finalize_async_calls(blocking=True)


def write(state: dict[str, Any], folder: str | Path, strategy: Any = None) -> None:
    """Write a sharded state dict."""
    from megatron.core import dist_checkpointing

    _as_in_its_day()
    _number_saves_from_zero()
    dist_checkpointing.save(state, str(folder), strategy, **OPTIONS)


def _in_parallel(action: str, folder: str) -> Any:
    """Megatron's own strategy inside the one that shares the work out, as Megatron-LM
    does it.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import fully_parallel

    inner = (
        serialization.get_default_save_sharded_strategy()
        if action == "Save"
        else serialization.get_default_load_sharded_strategy(folder)
    )
    wrapper = getattr(fully_parallel, f"FullyParallel{action}StrategyWrapper")
    return wrapper(inner, ps.get_data_parallel_group(with_context_parallel=True))


def load(built: Built, folder: str | Path, format: str, parallel: bool = False) -> None:
    """Read them into a model and an optimizer, with --ckpt-fully-parallel-load if
    ``parallel``.
    """
    folder = str(folder)
    if format == "torch":
        assert not parallel, "that is torch_dist's"
        _load_torch(built, folder)
    else:
        from megatron.core import dist_checkpointing

        _as_in_its_day()
        strategy = _in_parallel("Load", folder) if parallel else None
        state = sharded(built, format, is_loading=True)
        loaded = dist_checkpointing.load(state, folder, strategy, **OPTIONS)
        for name, model in _models(built).items():
            model.load_state_dict(loaded[name])
        if _trains(built):
            built.optimizer.load_state_dict(loaded["optimizer"])


# formats: what Megatron takes where nothing is said
VERLS, AREALS = ("verl's", "AReaL's")


def sharded(built: Built, format: str, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict of all that is saved, as ``generate_state_dict`` makes
    it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state = sharded_models(built)
    # their generate_state_dict; AReaL does not say that it loads
    if format in (VERLS, AREALS):
        said = {"is_loading": is_loading} if format == VERLS else {}
        return {**state, "optimizer": built.optimizer.sharded_state_dict(state, **said)}
    metadata = {
        "distrib_optim_sharding_type": format,
        "chained_optim_avoid_prefix": True,
    }
    takes = inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    option = (
        {"metadata": metadata} if "metadata" in takes else {"sharding_type": format}
    )
    if _trains(built):
        state["optimizer"] = built.optimizer.sharded_state_dict(
            state, is_loading, **option
        )
    return state


def sharded_models(built: Built) -> dict[str, Any]:
    """The part of ``sharded`` that is the model's."""
    state = {}
    for number, (name, model) in enumerate(_models(built).items()):
        # the number of a layer depends on it
        if VERSION < (0, 13) and len(built.chunks) > 1:
            from megatron.core import parallel_state as ps

            ps.set_virtual_pipeline_model_parallel_rank(number)
        state[name] = model.sharded_state_dict()
    return state


def _trains(built: Built) -> bool:
    """Megatron-LM passes over ranks where nothing does, but in
    ``load_parameter_state``.
    """
    return not built.optimizer.is_stub_optimizer


def _models(built: Built) -> dict[str, Any]:
    from megatron.core.transformer.module import Float16Module

    models = {}
    for number, chunk in enumerate(built.chunks):
        model = chunk.module
        name = f"model{number}" if len(built.chunks) > 1 else "model"
        models[name] = model.module if isinstance(model, Float16Module) else model
    return models


def _files(folder: str | Path) -> tuple[str, str]:
    from megatron.core import parallel_state as ps

    ranks = (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_expert_model_parallel_rank(),
    )
    start = os.path.join(folder, "_".join(map(str, ranks)))
    return f"{start}_model_optim.pt", f"{start}_distrib_optim.pt"


def _save_torch(built: Built, folder: str) -> None:
    from megatron.core import parallel_state as ps

    model_file, optimizer_file = _files(folder)
    if _trains(built):
        built.optimizer.save_parameter_state(optimizer_file)
    if ps.get_expert_data_parallel_rank() == 0:
        state = {name: model.state_dict() for name, model in _models(built).items()}
        if _trains(built):
            state["optimizer"] = built.optimizer.state_dict()
        torch.save(state, model_file)
    torch.distributed.barrier()


def _load_torch(built: Built, folder: str) -> None:
    model_file, optimizer_file = _files(folder)
    state = torch.load(model_file, weights_only=False)
    for name, model in _models(built).items():
        model.load_state_dict(state[name])
    if _trains(built):
        built.optimizer.load_state_dict(state["optimizer"])
    built.optimizer.load_parameter_state(optimizer_file)


def reading_the_other(
    built: Built, momentum: Any = "momentum"
) -> AbstractContextManager[None]:
    """Within it Muon loads a checkpoint of AdamW's, or AdamW one of Muon's by the
    settings of its case.
    """
    if built.case.optimizer == "muon":
        return reading_adamw(built.optimizer, momentum)
    return reading_muon(built.optimizer, asdict(built.case.settings))


def load_parameter_state(built: Built, folder: str | Path, format: str) -> None:
    """What the optimizer itself reads in the format ``torch``."""
    assert format == "torch", "that has no file of its own for it"
    built.optimizer.load_parameter_state(_files(folder)[1])


@torch.no_grad()
def spoil(built: Built) -> None:
    """Change all that a load must bring back; what a new run starts with is not what
    was saved.
    """
    for param in built.params.values():
        param.mul_(-0.5)
    for group in built.param_groups:
        for shard in group["params"]:
            shard.mul_(-0.5)


def resumed(
    case: Case, topology: Topology, format: str, folder: str | Path, dirty: bool = False
) -> dict[str, Any]:
    """Take half of the case's steps, save, go on; load into a new run and go on there,
    too.

    With ``dirty`` the new run has taken a step before the load, so that its state is
    made and wrong. ``moved``: whether the steps after the load changed anything.
    """
    half = case.steps // 2
    rest = range(half, case.steps)
    built = stepped(case, topology, half)
    before = held(built)
    save(built, folder, format)
    unlike = unequal(before, held(built), "by saving: ")
    take_steps(built, rest)
    expected = held(built)

    again = start(case, topology)
    if dirty:
        take_step(again, case.steps + 1)
    spoil(again)
    again.log.clear()
    load(again, folder, format)
    unlike += unequal(before, held(again), "by loading: ", log=False)
    take_steps(again, rest)
    after = held(again)
    for name, values in after["log"].items():
        if values != expected["log"][name][half:]:
            unlike.append(f"{name}: {values}, not {expected['log'][name][half:]}")
    unlike += unequal(expected, after, "after more steps: ", log=False)
    moved = bool(unequal(before, after, "", log=False))
    return {"differences": unlike, "moved": moved, "held": after}


def save_new(
    case: Case, topology: Topology, format: str, folder: str | Path
) -> dict[str, Any]:
    """Save a run that has taken the case's steps; what it holds."""
    built = stepped(case, topology)
    save(built, folder, format)
    return held(built)


def error_of_load(
    case: Case, topology: Topology, format: str, folder: str | Path
) -> str:
    """What loading into a new run raises, as text."""
    built = start(case, topology)
    return error_of(lambda: load(built, folder, format))


def error_of_save(
    case: Case, topology: Topology, format: str, folder: str | Path
) -> str:
    """What saving raises, as text."""
    built = start(case, topology)
    return error_of(lambda: save(built, folder, format))


def unequal(
    one: dict[str, Any], two: dict[str, Any], where: str, log: bool = True
) -> list[str]:
    """Names of what differs between two ``held`` of one rank."""
    unlike = [f"{where}log"] * (log and one["log"] != two["log"])
    for name, array in one["params"].items():
        if not numpy.array_equal(array, two["params"][name]):
            unlike.append(f"{where}{name}")
    assert one["shards"].keys() == two["shards"].keys()
    for name, (*span, arrays) in one["shards"].items():
        *other_span, others = two["shards"][name]
        assert span == other_span
        assert not where.startswith("after") or arrays.keys() == others.keys(), (
            name,
            others,
        )
        for kind in arrays.keys() & others.keys():
            if not numpy.array_equal(arrays[kind], others[kind]):
                unlike.append(f"{where}{kind} of {name}")
    return unlike
