"""Frameworks of reinforcement learning over the plugin: theirs builds, steps, moves,
saves, loads.

Each where an environment variable has its clone (``VERL_PATH=…``, ``SLIME_PATH``,
``MILES_PATH``, ``AREAL_PATH``), in an environment with what it imports. On a CPU a move
to the host is a copy here, and memory is not pinned.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from support.checkpoints.saving import spoil
from support.installed import installed
from support.models.gpt import (
    Built,
    Case,
    Topology,
    build,
    held,
    on_ranks,
    prepare_step,
    start,
    truth,
)
from support.ranks import run
from support.runs.topologies import DP2_EP2, DP3, TP2_DP2_OVERLAP
from support.runs.whole import differences, whole

CASE = Case(steps=4)
RUNS = [(CASE, DP3), (CASE, TP2_DP2_OVERLAP), (Case(steps=4, moe=True), DP2_EP2)]


def clone_of(name: str) -> Any:
    """A mark for tests of a framework: there is a clone."""
    variable = f"{name.upper()}_PATH"
    return pytest.mark.skipif(
        variable not in os.environ, reason=f"{variable} names no clone"
    )


def _module(framework: str, name: str) -> Any:
    folder = os.environ[f"{framework.upper()}_PATH"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def _moved(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    copy = tensor.clone()
    tensor.fill_(torch.nan)
    return copy


@contextmanager
def _moves() -> Iterator[None]:
    """Within it tensors move as between a GPU and the host."""
    tensor = Tensor
    with (
        mock.patch.object(tensor, "to", _moved),
        mock.patch.object(tensor, "cpu", tensor.clone),
        mock.patch.object(tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.cpu, "empty_cache", lambda: None, create=True),
    ):
        yield


def _steps(built: Built, steps: range, step: Any, between: Any) -> None:
    for number in steps:
        prepare_step(built, number)
        for group in built.groups:
            group.param_gather_dispatched = False  # as the backward pass does
        step()
        built.optimizer.wait_for_params()
        between()


# ----------------------------------------------------------------------------- verl


def _made_by_verl(case: Case, topology: Topology) -> Built:
    from omegaconf import OmegaConf

    betas = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": case.adam_eps}
    settings = {
        "optimizer": "muon",
        "lr": case.lr,
        "min_lr": 0.0,
        "clip_grad": case.clip,
    }
    settings |= {"weight_decay": case.weight_decay, "override_optimizer_config": betas}
    with installed(case.settings):
        built = build(case, topology)
        # its engine imports it here
        sys.modules.pop("verl.utils.megatron.optimizer", None)
        theirs = _module("verl", "verl.utils.megatron.optimizer")
        config = theirs.init_megatron_optim_config(OmegaConf.create(settings))
        built.optimizer = theirs.get_megatron_optimizer(built.chunks, config)
    return built


def _manager(built: Built, **options: Any) -> Any:
    """Its manager of checkpoints, as its Megatron engine makes it."""
    from transformers import LlamaConfig

    module = _module("verl", "verl.utils.checkpoint.megatron_checkpoint_manager")
    contents = ["model", "optimizer"]
    return module.MegatronCheckpointManager(
        config=SimpleNamespace(model=SimpleNamespace(path="")),
        checkpoint_config=_Settings(
            async_save=False, save_contents=contents, load_contents=contents
        ),
        model_config=None,
        transformer_config=None,
        role="actor",
        model=built.chunks,
        arch="LlamaForCausalLM",
        hf_config=LlamaConfig(),
        param_dtype=built.case.dtype,
        share_embeddings_and_output_weights=False,
        processing_class=None,
        optimizer=built.optimizer,
        optimizer_scheduler=None,
        use_distributed_optimizer=True,
        **options,
    )


class _Settings(dict[str, Any]):
    __getattr__ = dict.__getitem__


class _Bridge:
    """Stands in for mbridge, which saves the model without its optimizer in HF's
    format.
    """

    def save_weights(self, chunks: Any, folder: str, **_: Any) -> None:
        torch.save([chunk.state_dict() for chunk in chunks], self._file(folder))

    def load_weights(self, chunks: Any, folder: str) -> None:
        for chunk, state in zip(chunks, torch.load(self._file(folder)), strict=True):
            chunk.load_state_dict(state)

    def _file(self, folder: str) -> Path:
        Path(folder).mkdir(exist_ok=True)
        return Path(folder) / f"{torch.distributed.get_rank()}.pt"


def _by_verl(
    case: Case, topology: Topology, folder: str, options: Any
) -> dict[str, Any]:
    moves = _module("verl", "verl.utils.megatron_utils")
    engine = _module(
        "verl", "verl.workers.engine.megatron.transformer_impl"
    ).MegatronEngine

    def offload_and_load() -> None:
        with _moves():
            moves.offload_megatron_model_to_cpu(built.chunks)
            moves.offload_megatron_optimizer(built.optimizer)
            moves.load_megatron_model_to_gpu(built.chunks)
            moves.load_megatron_optimizer(built.optimizer)

    def step() -> None:
        engine.optimizer_step(SimpleNamespace(optimizer=built.optimizer))

    built = _made_by_verl(case, topology)
    _steps(built, range(2), step, offload_and_load)
    _manager(built, **options).save_checkpoint(folder)
    built = _made_by_verl(case, topology)
    spoil(built)
    _manager(built, **options).load_checkpoint(folder)
    _steps(built, range(2, case.steps), step, offload_and_load)
    return held(built)


@clone_of("verl")
@pytest.mark.parametrize(
    "options", [{}, {"use_dist_checkpointing": False, "bridge": _Bridge()}]
)
@pytest.mark.parametrize("case, topology", RUNS)
def test_verl_builds_steps_offloads_saves_and_loads(
    case: Case, topology: Topology, options: Any, tmp_path: Path
) -> None:
    size = topology.world_size
    results = run(_by_verl, size, case, topology, str(tmp_path), options, timeout=300)
    assert differences(truth(case), whole(results)) == []


# ---------------------------------------------------------------------------- AReaL


def _by_areal(case: Case, topology: Topology, folder: str) -> dict[str, Any]:
    def manager() -> Any:
        module = _module("areal", "areal.engine.megatron_utils.checkpointer")
        return module.MegatronCheckpointManager(built.chunks, built.optimizer, None)

    built = start(case, topology)
    _steps(built, range(2), lambda: built.optimizer.step(), lambda: None)
    manager().save_checkpoint(folder, with_rng=False)
    built = start(case, topology)
    spoil(built)
    manager().load_checkpoint(folder, with_rng=False)
    _steps(built, range(2, case.steps), lambda: built.optimizer.step(), lambda: None)
    return held(built)


@clone_of("areal")
@pytest.mark.parametrize("case, topology", RUNS)
def test_areals_checkpoints_resume(
    case: Case, topology: Topology, tmp_path: Path
) -> None:
    """It says neither a format nor, at a load, that it loads."""
    results = on_ranks(_by_areal, case, topology, str(tmp_path), timeout=300)
    assert differences(truth(case), whole(results)) == []


# ------------------------------------------------------------------- slime and miles


@contextmanager
def _reloadable(name: str) -> Iterator[Any]:
    """Its torch.distributed, whose groups can be destroyed and made again, and the
    module of it.
    """
    point = torch.distributed.P2POp
    before, methods = dict(vars(torch.distributed)), (point.__new__, point.__init__)
    groups = _module(name, f"{name}.utils.reloadable_process_group")
    groups.monkey_patch_torch_dist()
    memory = {"print_memory": lambda _: {}, "available_memory": lambda: {"free_GB": 9}}
    is_gpus = {"_uses_accelerator_backend": lambda _: True}
    try:
        with mock.patch.multiple(groups, create=True, **memory, **is_gpus):
            if hasattr(groups, "register_default_process_group"):  # the world, too
                groups.set_gloo_group(None)
                groups.init_gloo_group()
                groups.register_default_process_group(timeout=timedelta(minutes=1))
            yield groups
    finally:
        vars(torch.distributed).update(before)
        point.__new__, point.__init__ = methods
        groups.old_new_group_dict.clear()
        getattr(groups, "default_process_group_states", {}).clear()
        groups.ReloadableProcessGroup.GROUPS.clear()


def _asleep_and_awake(case: Case, topology: Topology, name: str) -> dict[str, Any]:
    """Each step is between a wake and a sleep of its actor, which keeps weights on the
    host.
    """
    backups = _module(name, f"{name}.utils.tensor_backper")
    nothing = SimpleNamespace(synchronize=lambda: None)
    with (
        _reloadable(name) as groups,
        mock.patch.object(backups, "accelerator", nothing, create=True),
    ):
        built = start(case, topology)
        backup = backups._TensorBackuperNormal(
            source_getter=lambda: built.params.items()
        )
        pageable = {
            each: torch.empty_like(param) for each, param in built.params.items()
        }
        backup._backups["actor"] = pageable  # it would make pinned ones

        def sleep_and_wake() -> None:
            backup.backup("actor")
            groups.destroy_process_groups()
            for buffer in built.buffers():
                buffer.param_data.fill_(torch.nan)
            groups.reload_process_groups()
            backup.restore("actor")

        _steps(built, range(case.steps), lambda: built.optimizer.step(), sleep_and_wake)
        return held(built)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=clone_of(name)) for name in ("slime", "miles")]
)
@pytest.mark.parametrize("case, topology", RUNS)
def test_its_actor_sleeps_without_process_groups_and_wakes(
    name: str, case: Case, topology: Topology
) -> None:
    results = on_ranks(_asleep_and_awake, case, topology, name, timeout=300)
    assert differences(truth(case), whole(results)) == []
