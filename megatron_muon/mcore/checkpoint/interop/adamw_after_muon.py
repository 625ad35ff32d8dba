"""From Muon to AdamW: reading a Muon checkpoint into AdamW's DistributedOptimizer.

Parameters that Muon updated before are called young. Their Adam moments start at zero,
and so does the count of steps that corrects the moments' bias. AdamW's other parameters
go on as they were. A fused Adam counts steps per parameter group, so within a step the
young shards are in separate groups, with a smaller count. At any other time groups,
counts and checkpoints are AdamW's, which any Megatron reads. A record beside the
optimizer's state tells this package how many steps the young parameters are behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_muon.mcore.checkpoint.buffers import ADAMW_STATE, warn_if_shifted
from megatron_muon.mcore.checkpoint.chain import HALF_LOADED, CheckpointChain
from megatron_muon.mcore.checkpoint.formats import MuonCheckpoint
from megatron_muon.mcore.checkpoint.param_groups import Settings, config_of
from megatron_muon.mcore.checkpoint.sharded import StateDict
from megatron_muon.mcore.host import process_groups
from megatron_muon.mcore.host.process_groups import group_sizes, local_experts
from megatron_muon.mcore.host.shards import (
    device_of,
    owned_shards,
    parts_of,
    states_of,
)
from megatron_muon.mcore.host.states import init_state_of
from megatron_muon.mcore.routing.param_routing import weights, why_adamw
from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import Patches, replaced, turn_into
from megatron_muon.settings.config import MuonConfig

Group = dict[str, Any]

YOUNG = "megatron_muon_young"  # the record's key, beside "optimizer" in the state dict


# --- after the load -------------------------------------------------------------------


class AdamWAfterMuon(DistributedOptimizer):  # type: ignore[misc]
    """An AdamW DistributedOptimizer in which the young parameters have taken fewer
    steps.
    """

    former: MuonConfig  # the settings of the Muon that updated them before
    young: Sequence[Tensor]  # this rank's shards of them
    behind: int = 0  # how many steps fewer they have taken

    def step_with_ready_grads(self) -> Any:
        """Megatron's step, which counts the young shards' steps apart."""
        with self._young_apart():
            return super().step_with_ready_grads()

    @contextmanager
    def _young_apart(self) -> Iterator[None]:
        """A context of one step, in which young shards have groups of their own."""
        adam = self.optimizer
        groups: list[Group] = []
        counted: list[Group] = []
        for group in adam.param_groups:
            # torch's own AdamW counts per shard; before a first step core 0.14 has None
            if group.get("step") is None:
                groups.append(group)
            else:
                counted.append(group)
                groups += self._cut(group)
        # Apex's Adam zips the groups with this list of master weights, here without any
        # (https://github.com/NVIDIA/apex/blob/6424da3b4faa/apex/optimizers/fused_adam.py#L171)
        masters = [{"params": [None] * len(group["params"])} for group in groups]
        self._shift_steps_of_shards(-self.behind)
        try:
            with replaced(adam, param_groups=groups, param_groups_master=masters):
                yield
        finally:
            self._shift_steps_of_shards(self.behind)
        for group in counted:  # Adam has counted in copies
            group["step"] += 1

    def _cut(self, group: Group) -> list[Group]:
        """Two copies: with the group's other shards, and with its young ones."""
        young = set(map(id, self.young))
        shards: dict[bool, list[Tensor]] = {False: [], True: []}
        for shard in group["params"]:
            shards[id(shard) in young].append(shard)
        return [
            # no two groups share a step that is a tensor
            {**group, "params": some, "step": group["step"] - is_young * self.behind}
            for is_young, some in shards.items()
        ]

    def _shift_steps_of_shards(self, by: int) -> None:
        for shard in self.young:
            # adds no entry: Megatron tests for some
            state = self.optimizer.state.get(shard, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"] + by

    def state_dict(self) -> StateDict:
        """Megatron's state dict, plus the record that tells young parameters from the
        others.
        """
        young = {"behind": self.behind, "former": dataclasses.asdict(self.former)}
        return {**super().state_dict(), YOUNG: young}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load AdamW's state dict; without a record no parameter is behind."""
        super().load_state_dict(state_dict)
        self.behind = state_dict[YOUNG]["behind"] if YOUNG in state_dict else 0

    def sharded_param_state_fully_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *rest: Any
    ) -> Any:
        """Megatron's state of whole weights, with a warning where Megatron shifts
        it.
        """
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        if not is_loading and tp_rank == self.data_parallel_group.rank() == 0:
            warn_if_shifted(self.buffers)
        return super().sharded_param_state_fully_reshardable(
            model_sharded_state_dict, is_loading, *rest
        )


def go_on_after_muon(optimizer: Any, former: Settings) -> None:
    """Prepare AdamW's chain to load a checkpoint that has ``YOUNG``, with its
    ``former``.
    """
    config = config_of(former)
    for part in parts_of(optimizer):
        muons = _muons(part, config)
        turn_into(part, AdamWAfterMuon)
        part.former = config
        part.young = [shard for param, shard in owned_shards(part) if param in muons]


# --- the load -------------------------------------------------------------------------


@contextmanager
def reading_muon(optimizer: Any, settings: Settings) -> Iterator[None]:
    """See ``megatron_muon.reading_muon``; ``settings`` are those of Muon in the
    checkpoint.

    Within the block the optimizers have the classes that read Muon's formats. After it
    they have their former classes again, since AdamW steps and saves, or after a load
    AdamWAfterMuon. If the block raises once something is loaded, the optimizer neither
    steps nor is saved until a next load.
    """
    parts = parts_of(optimizer)
    every = optimizer.chained_optimizers
    chunks = every[0].model_chunks
    device = device_of(chunks)
    changes = Patches()
    try:
        together(lambda: _turn_into_readers(changes, parts, settings), None, device)
        instance = int(every[0].distributed_optimizer_instance_id)
        stage = process_groups.stage_of(chunks, instance, None, device)
        _turn(
            changes,
            optimizer,
            CheckpointChain,
            voters=process_groups.voters(every, stage),
            decided_by_name=False,
            is_converting=True,
        )
        yield
    except BaseException:
        if _have_loaded(parts):
            _refuse_until_a_load(optimizer)
        raise
    finally:
        changes.undo()
    if not _have_loaded(parts):
        return
    go_on_after_muon(optimizer, settings)
    for part in parts:
        part.behind = _steps_taken(part)
        for shard in part.young:
            for key in ADAMW_STATE:
                part.optimizer.state[shard][key].zero_()


def _turn_into_readers(
    changes: Patches, parts: Sequence[Any], settings: Settings
) -> None:
    """Have AdamW's optimizers load as Muon's do, but no momentum."""
    config = config_of(settings)
    for part in parts:
        if part.config.optimizer_cpu_offload:
            raise NotImplementedError(
                "a Muon checkpoint cannot be loaded into AdamW with "
                "optimizer_cpu_offload: load it once without --optimizer-cpu-offload, "
                "save, and go on with the flag"
            )
        chunks = part.model_chunks
        states = states_of(part)
        _turn(
            changes,
            part,
            MuonCheckpoint,
            drops_momentum=True,
            muon=SimpleNamespace(numerics=numerics_on(device_of(chunks), config)),
            _muons=_muons(part, config),
            states=states,
            init_state_fn=init_state_of(part.init_state_fn, states, None),
            local_experts=local_experts(chunks, group_sizes(chunks[0], None).ep),
            ep_rank=parallel_state.get_expert_model_parallel_rank(),
        )


def _turn(changes: Patches, built: Any, subclass: type, **attributes: Any) -> None:
    changes.on_undo(partial(turn_into, built, type(built)))
    turn_into(built, subclass)
    for name, value in attributes.items():
        changes.add(built, name, value)


def _have_loaded(parts: Sequence[Any]) -> bool:
    """Whether a load has changed one of the optimizers, which forget it."""
    return any([vars(part).pop("half_loaded", False) for part in parts])


def _refuse_until_a_load(optimizer: Any) -> None:
    """Have a chain that is half loaded neither step nor be saved until its next load.

    Its attributes hide the methods of its class, whichever that is meanwhile.
    """
    refused = Patches()

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(HALF_LOADED)

    def sharded_state_dict(state: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if not is_loading:
            refuse()
        own = type(optimizer).sharded_state_dict
        return own(optimizer, state, is_loading, **kwargs)

    def load_state_dict(state_dict: Any) -> None:
        type(optimizer).load_state_dict(optimizer, state_dict)
        refused.undo()

    for name in ("step", "step_with_ready_grads", "state_dict", "save_parameter_state"):
        refused.add(optimizer, name, refuse)
    refused.add(optimizer, "sharded_state_dict", sharded_state_dict)
    refused.add(optimizer, "load_state_dict", load_state_dict)


# --- both -----------------------------------------------------------------------------


def _steps_taken(part: Any) -> int:
    """The number of steps that a loaded AdamW has taken, by group or by shard."""
    counted = [*part.optimizer.param_groups, *part.optimizer.state.values()]
    steps = (entry.get("step") for entry in counted)
    return max((int(step) for step in steps if step is not None), default=0)


def _muons(part: Any, config: MuonConfig) -> set[Parameter]:
    """The parameters that Muon with these settings would update."""
    chunks = part.model_chunks
    every = weights(chunks, group_sizes(chunks[0], None))
    return {weight.param for weight in every if why_adamw(weight, config) is None}
