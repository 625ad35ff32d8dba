"""From Muon to AdamW: reading a Muon checkpoint into AdamW's DistributedOptimizer.

Muon's former parameters are called young: their Adam moments start at zero, and so does
the count of steps that corrects the moments' bias. AdamW's own parameters go on as they
were. A fused Adam counts steps per parameter group. So each group with both kinds is
split in two, and merged again wherever Megatron saves or loads. The checkpoints are
AdamW's, which any Megatron reads. A record beside the optimizer's state tells this
package how many steps the young parameters are behind.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.console import say
from megatron_muon.mcore.checkpoint.buffers import ADAMW_STATE, is_shifted
from megatron_muon.mcore.checkpoint.chain import HALF_LOADED, CheckpointChain
from megatron_muon.mcore.checkpoint.formats import MuonCheckpoint
from megatron_muon.mcore.checkpoint.param_groups import YOUNG_OF, config_of
from megatron_muon.mcore.checkpoint.sharded import StateDict
from megatron_muon.mcore.host import process_groups
from megatron_muon.mcore.host.process_groups import Sizes, local_experts
from megatron_muon.mcore.host.shards import device_of, owned_shards, states_of
from megatron_muon.mcore.host.states import init_state_of
from megatron_muon.mcore.routing.param_routing import weights, why_adamw
from megatron_muon.mcore.seams.rows import megatron_version
from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.patches import Patches, turn_into
from megatron_muon.settings.config import MuonConfig

Tensor = torch.Tensor
Group = dict[str, Any]

YOUNG = "megatron_muon_young"  # the record's key, beside "optimizer" in the state dict


class _Former:
    """Stands in for the DistributedMuon that wrote the checkpoint, as MuonCheckpoint
    uses it.
    """

    def __init__(self, config: MuonConfig, part: Any) -> None:
        self.config = config
        self.numerics = numerics_on(device_of(part.model_chunks), config)
        self._muons = {id(shard) for shard in _young_shards(part, config)}

    def owns(self, shard: Tensor) -> bool:
        return id(shard) in self._muons


class MuonReader(MuonCheckpoint):
    """An AdamW DistributedOptimizer that reads a Muon checkpoint, except for the
    momentum.
    """

    def _keys_on_disk(self, shard: Tensor) -> dict[str, str]:
        return {} if self._muon.owns(shard) else super()._keys_on_disk(shard)


class AdamWAfterMuon(DistributedOptimizer):  # type: ignore[misc]
    """An AdamW DistributedOptimizer in which the young parameters have taken fewer
    steps.
    """

    former: MuonConfig  # the settings of the Muon that updated them before
    behind: int = 0  # how many steps fewer they have taken
    _is_whole: bool = False

    def state_dict(self) -> StateDict:
        """Megatron's state dict, plus the record that tells young parameters from the
        others.
        """
        with self._whole():
            state: StateDict = super().state_dict()
        young = {"behind": self.behind, "former": dataclasses.asdict(self.former)}
        return {**state, YOUNG: young}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load into merged groups, then split them."""
        with self._whole():
            super().load_state_dict(state_dict)
            if YOUNG in state_dict:  # read it before the groups are split by it
                self.behind = state_dict[YOUNG]["behind"]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's sharded state dict, of merged groups."""
        with self._whole():
            return super().sharded_state_dict(*args, **kwargs)

    def sharded_param_state_fully_reshardable(
        self,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """Megatron's state of whole weights, with a warning where Megatron shifts
        it.
        """
        if not is_loading:
            self._warn_if_shifted()
        return super().sharded_param_state_fully_reshardable(
            model_sharded_state_dict, is_loading, *rest, **kwargs
        )

    def _warn_if_shifted(self) -> None:
        first_of_stage = (
            self.data_parallel_group.rank() == 0
            and parallel_state.get_tensor_model_parallel_rank() == 0
        )
        if first_of_stage and any(is_shifted(buffer) for buffer in self.buffers):
            say(
                "[megatron_muon] warning: fully_reshardable of megatron-core "
                f"{megatron_version()[0]} saves AdamW's state shifted where several "
                "buckets are padded, as here. A run that loads this save goes on with "
                "wrong weights. Give --ddp-num-buckets 1, or leave "
                "--dist-ckpt-optim-fully-reshardable out"
            )

    def get_parameter_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's gathered state, of merged groups."""
        with self._whole():
            return super().get_parameter_state_dp_zero(*args, **kwargs)

    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> None:
        """Load gathered state into merged groups."""
        with self._whole():
            super().load_parameter_state_from_dp_zero(*args, **kwargs)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Merge the groups into those that Megatron has made, all at one step, for a
        ``with``.
        """
        with ExitStack() as split:
            if not self._is_whole:
                self._make_whole()
                split.callback(self._split)
            yield

    def _make_whole(self) -> None:
        groups = self.optimizer.param_groups
        old = [group for group in groups if YOUNG_OF not in group]
        step = max(
            (
                group["step"] + (self.behind if YOUNG_OF in group else 0)
                for group in groups
                if group.get("step") is not None and group["params"]
            ),
            default=None,
        )
        for group, params in zip(old, self._order, strict=True):
            group["params"] = params
            if step is not None:
                group["step"] = step
        self.optimizer.param_groups[:] = old
        _as_many_masters(self.optimizer)
        self._shift_steps(self.behind)
        self._is_whole = True

    def _split(self) -> None:
        """Move the young shards of each group into a group of their own."""
        self._is_whole = False
        young = {id(shard) for shard in _young_shards(self, self.former)}
        self._order = [list(group["params"]) for group in self.optimizer.param_groups]
        for number, group in enumerate(list(self.optimizer.param_groups)):
            theirs = [shard for shard in group["params"] if id(shard) in young]
            # core 0.14 gives None to new groups
            if not theirs or group.get("step") is None:
                continue
            group["params"] = [
                shard for shard in group["params"] if id(shard) not in young
            ]
            step = group["step"] - self.behind
            self.optimizer.param_groups.append(
                {**group, "params": theirs, "step": step, YOUNG_OF: number}
            )
        _as_many_masters(self.optimizer)
        self._shift_steps(-self.behind)

    def _shift_steps(self, by: int) -> None:
        """Shift the young shards' steps in torch's own AdamW, which counts them per
        parameter.
        """
        for shard in _young_shards(self, self.former):
            # adds no entry: Megatron tests for some
            state = self.optimizer.state.get(shard, {})
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"] + by


class ChainAfterMuon(ChainedOptimizer):  # type: ignore[misc]
    """A chain of AdamWAfterMuon optimizers, dense and experts'."""

    def _synchronize_steps(self) -> None:
        """Call Megatron's method with merged groups, since it wants one step for all of
        them.
        """
        with ExitStack() as whole:
            for part in self.chained_optimizers:
                if not part.is_stub_optimizer:
                    whole.enter_context(part._whole())
            super()._synchronize_steps()


class HalfRead(ChainedOptimizer):  # type: ignore[misc]
    """AdamW's chain after an error within ``reading_muon`` that has loaded a part of
    it.
    """

    before: type = ChainedOptimizer  # its class

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(HALF_LOADED)

    step = step_with_ready_grads = state_dict = save_parameter_state = _refuse

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's; refused but for a load."""
        given = inspect.signature(super().sharded_state_dict).bind(*args, **kwargs)
        if not given.arguments.get("is_loading", False):
            self._refuse()
        return super().sharded_state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        """Megatron's, by which the chain is whole again."""
        super().load_state_dict(state_dict)
        turn_into(self, self.before)


@contextmanager
def reading_muon(optimizer: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """See ``megatron_muon.reading_muon``; ``settings`` are those of Muon in the
    checkpoint.

    Where nothing is loaded, or the block raises, the optimizer is AdamW's as it was
    before. If the block has loaded something by then, that one neither steps nor is
    saved until a next load.
    """
    if isinstance(optimizer, HalfRead):
        turn_into(optimizer, optimizer.before)
    chain = type(optimizer)
    parts = [
        part for part in optimizer.chained_optimizers if not part.is_stub_optimizer
    ]
    turned = Patches()
    try:
        config = _turn_into_reader(turned, optimizer, parts, settings)
        yield
        if _has_loaded(parts):
            _turn_into_adamw(optimizer, chain, parts, config)
        else:
            turned.undo()
    except BaseException:
        is_half = _has_loaded(parts)
        turned.undo()
        if is_half:
            turn_into(optimizer, type("HalfRead", (HalfRead, chain), {"before": chain}))
        raise
    finally:
        for part in parts:
            vars(part).pop("half_loaded", None)


def _has_loaded(parts: Sequence[Any]) -> bool:
    return any(getattr(part, "half_loaded", False) for part in parts)


def _turn_into_reader(
    turned: Patches, optimizer: Any, parts: Sequence[Any], settings: Mapping[str, Any]
) -> MuonConfig:
    """Turn the chain and its parts, as ``turned`` undoes it. Every rank of the world
    calls it.
    """
    chain, every = type(optimizer), optimizer.chained_optimizers
    device = device_of(every[0].model_chunks)
    config = together(
        lambda: _turn_parts_into_readers(turned, parts, settings), None, device
    )
    instance = int(every[0].distributed_optimizer_instance_id)
    stage = process_groups.stage_of(every[0].model_chunks, instance, None, device)
    turned.add(optimizer, "voters", process_groups.voters(every, stage))
    turned.add(optimizer, "decided_by_name", False)
    turned.add(optimizer, "is_converting", True)
    _turn(turned, optimizer, type("Reader", (CheckpointChain, chain), {}))
    return config


def _turn_into_adamw(
    optimizer: Any, chain: type, parts: Sequence[Any], config: MuonConfig
) -> None:
    """Turn them into AdamW's, once they have loaded Muon's checkpoint."""
    turn_into(optimizer, type("AfterMuon", (ChainAfterMuon, chain), {}))
    for part in parts:
        part.muon = None
        turn_into(part, AdamWAfterMuon)
        part.former = config
        for shard in _young_shards(part, config):
            for key in ADAMW_STATE:
                part.optimizer.state[shard][key].zero_()
        part.behind = _step(part)
        part._split()


def _turn_parts_into_readers(
    turned: Patches, parts: Sequence[Any], settings: Mapping[str, Any]
) -> MuonConfig:
    config = config_of(settings)
    for part in parts:
        if part.config.optimizer_cpu_offload:
            raise NotImplementedError(
                "a Muon checkpoint cannot be loaded into AdamW with "
                "optimizer_cpu_offload: load it once without --optimizer-cpu-offload, "
                "save, and go on with the flag"
            )
        _turn(turned, part, MuonReader)
        turned.add(part, "_muons", _young(part, config))
        turned.add(part, "states", states_of(part))
        if part.states.are_copies:
            init_state = init_state_of(part.init_state_fn, part.states, None)
            turned.add(part, "init_state_fn", init_state)
        turned.add(part, "muon", _Former(config, part))
        turned.add(part, "local_experts", local_experts(part.model_chunks, _sizes().ep))
        turned.add(part, "ep_rank", parallel_state.get_expert_model_parallel_rank())
    return config


def _turn(turned: Patches, built: Any, subclass: type) -> None:
    turned.on_undo(partial(turn_into, built, type(built)))
    turn_into(built, subclass)


def go_on_after_muon(optimizer: Any, former: Mapping[str, Any]) -> None:
    """Prepare AdamW's chain to load a checkpoint that has ``YOUNG``, with its
    ``former``.
    """
    turn_into(optimizer, ChainAfterMuon)
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            turn_into(part, AdamWAfterMuon)
            part.former = config_of(former)
            part._split()


def _as_many_masters(adam: Any) -> None:
    """Give Apex's Adam an entry per group in its list of master weights, without any
    weight.

    Apex zips the groups with that list, so a group without an entry takes no step
    (https://github.com/NVIDIA/apex/blob/6424da3b4faa/apex/optimizers/fused_adam.py#L171).
    """
    if hasattr(adam, "param_groups_master"):
        adam.param_groups_master[:] = [
            {"params": [None] * len(group["params"])} for group in adam.param_groups
        ]


def _step(part: Any) -> int:
    """The number of steps that a loaded AdamW has taken."""
    steps = [group["step"] for group in part.optimizer.param_groups if "step" in group]
    counted = (state.get("step") for state in part.optimizer.state.values())
    steps += [int(step) for step in counted if torch.is_tensor(step)]
    return int(max(steps, default=0))


def _young_shards(part: Any, config: MuonConfig) -> list[Tensor]:
    """This rank's shards of the parameters that Muon with these settings would
    update.
    """
    muons = _young(part, config)
    return [shard for param, shard in owned_shards(part) if param in muons]


def _young(part: Any, config: MuonConfig) -> set[torch.nn.Parameter]:
    sizes = _sizes()
    every = weights(part.model_chunks)
    return {
        weight.param
        for weight in every
        if why_adamw(weight, weight.tp_size(sizes), config) is None
    }


def _sizes() -> Sizes:
    return Sizes(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        expert_tp=parallel_state.get_expert_tensor_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
    )
