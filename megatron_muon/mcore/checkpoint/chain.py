"""The checkpoint methods of Megatron's chain: an error stops all ranks, and stubs are
skipped.
"""

from __future__ import annotations

import inspect
import itertools
import os
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_muon.mcore.checkpoint.buffers import (
    AT_DP_ZERO,
    OTHER_CUT,
    groups_of,
    of_both_kinds,
    states_of,
)
from megatron_muon.mcore.host.shards import device_of, parts_of
from megatron_muon.runtime.collectives import (
    Group,
    all_gather_json,
    all_gather_numbers,
)
from megatron_muon.runtime.consensus import together
from megatron_muon.runtime.engine import HALF_STEPPED
from megatron_muon.runtime.patches import replaced
from megatron_muon.settings.config import named

if TYPE_CHECKING:
    from megatron_muon.mcore.checkpoint.interop.foreign import Source

T = TypeVar("T")

# The format that has a tensor for each weight.
WHOLE_WEIGHTS = (
    "fully_reshardable"
    if hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable")
    else "fully_sharded_model_space"  # before core 0.15
)
# From core 0.15 on Megatron cannot write its own default format.
_HAS_NO_RANGES = WHOLE_WEIGHTS == "fully_reshardable"
HALF_LOADED = (
    "a load of the optimizer ended in an error when it had changed a part of its "
    "state: load a checkpoint as a whole, or build the optimizer anew"
)
_OF_STATE = {"param_state", "param_state_sharding_type"}
# Megatron communicates to save them
_GATHERED = ("fully_reshardable", AT_DP_ZERO)


class CheckpointChain(ChainedOptimizer):  # type: ignore[misc]
    """Saves and loads the optimizers that are no stubs; Megatron alone would ask stubs
    for state, too.

    All ranks that have an optimizer which is no stub call the methods together, except
    ``state_dict``. They raise on all those ranks: this rank's error, or a RuntimeError
    that quotes another's.
    """

    chained_optimizers: list[Any]
    voters: Group | None  # the ranks that call the methods together; None for the world
    # name patterns assign weights to Muon or AdamW, so layers may differ
    decided_by_name: bool
    # while a checkpoint of Megatron's own Muon is read
    source: Source | None = None
    is_new = True  # it has taken no step
    lacks_state = False  # it has loaded groups, and no momentum with them
    half_stepped = False  # a step has changed state, and ended in an error
    is_converting = False  # a load is complete at the end of a context, not of a call

    @property
    def record(self) -> Any:
        """The record of Muon in a checkpoint; None where nothing of it is on this
        rank.
        """
        return next((part.record for part in parts_of(self)), None)

    def require_whole(self) -> None:
        """Raise a RuntimeError if this rank has stopped within a step or a load."""
        if self.half_stepped:
            raise RuntimeError(HALF_STEPPED)
        if any(getattr(part, "half_loaded", False) for part in self.chained_optimizers):
            raise RuntimeError(HALF_LOADED)

    def state_dict(self) -> Any:
        """Megatron's state dict, without the state of parameters. No communication."""
        self.require_whole()
        with self._without_stubs():
            return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict into each optimizer; ``formats`` checks what it holds."""
        state_dict = self._together(self._converted, state_dict)
        self._together(super().load_state_dict, state_dict)
        # A rank whose shards are padding alone may load a sharding type without any
        # state.
        has_state = any(state.keys() & _OF_STATE for state in states_of(state_dict))
        needs_state = self.is_new or self.half_stepped
        lacking = all_gather_numbers(
            [needs_state and not has_state], self.voters, self._device
        )
        self._end_load()
        self.lacks_state = any(lacks for (lacks,) in lacking)
        self.half_stepped = self.half_stepped and self.lacks_state

    def refuse_step(self) -> None:
        """Raise before a first step that ``lacks_state``, on every rank."""
        raise ValueError(
            "optimizer.load_state_dict() was given no state of parameters, which "
            "optimizer.state_dict() does not have, so momentum would start at zero: "
            "save and load optimizer.sharded_state_dict(), or call "
            "save_parameter_state(FILE) and load_parameter_state(FILE) too"
        )

    def _end_load(self) -> None:
        """Scatter what has been checked; the optimizers are whole again."""
        for part in parts_of(self):
            part.scatter()
        every = self.chained_optimizers
        if every[0].config.use_precision_aware_optimizer:
            # A loaded main parameter sets its part of the weight, which may have been
            # rounded otherwise where it lies between two bf16 values: other ranks get
            # that, too.
            chunks = itertools.chain.from_iterable(part.model_chunks for part in every)
            for chunk in dict.fromkeys(chunks):
                chunk.start_param_sync(force_sync=True)
        for part in () if self.is_converting else every:
            part.half_loaded = False

    def _converted(self, state_dict: Any) -> Any:
        if self.source is not None:
            from megatron_muon.mcore.checkpoint.interop.foreign import converted

            config = self.chained_optimizers[0].muon.config
            state_dict = converted(state_dict, self.source, config, WHOLE_WEIGHTS)
        return _for_parts(state_dict, len(self.chained_optimizers))

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Megatron's sharded state dict: to be saved, or to be filled with
        ``is_loading``.
        """
        source = self.source if is_loading else None
        if source is not None or (_format(kwargs) is None and _HAS_NO_RANGES):
            kwargs = _in_whole_weights(kwargs)
        if not is_loading:
            self._together(self._make_ready)
            for part in parts_of(self):
                part.gather_home_state()
        make = partial(
            super().sharded_state_dict, model_sharded_state_dict, is_loading, **kwargs
        )
        if is_loading or _format(kwargs) not in _GATHERED:
            state = self._together(make)
        else:
            with self._without_stubs():
                state = make()
        if source is not None:
            self._together(_rename, states_of(state), source)
        if self.decided_by_name:  # a setting, so all ranks take the same branch
            of_parts = (part.tensors for part in parts_of(self))
            _refuse_mixed(set().union(*of_parts), self.voters)
        return state

    def _make_ready(self) -> None:
        self.require_whole()
        for part in self.chained_optimizers:
            part.make_ready()

    def save_parameter_state(self, filename: str) -> None:
        """Save parameters' state in the format ``torch``, in Megatron's layout."""
        self._together(self._make_ready)
        states = []
        for part in parts_of(self):
            state = part.get_parameter_state_dp_zero()
            states.append(state if _holds_first_shard(part) else None)
        self._together(self._write, states, filename)

    def _write(self, states: list[Any], filename: str) -> None:
        if any(map(_holds_first_shard, self.chained_optimizers)):
            torch.save(states if len(states) > 1 else states[0], filename)

    def load_parameter_state(
        self, filename: str, *, update_legacy_format: bool = False
    ) -> None:
        """Load parameters' state in the format ``torch``."""
        self._together(self._check_file, filename)
        self._together(
            super().load_parameter_state,
            filename,
            update_legacy_format=update_legacy_format,
        )
        self._end_load()
        self.half_stepped = self.half_stepped and not self.lacks_state
        self.lacks_state = False

    def _check_file(self, filename: str) -> None:
        if not any(map(_holds_first_shard, self.chained_optimizers)):
            return
        if not os.path.exists(filename):
            raise FileNotFoundError(
                f"The optimizer's file {filename} is missing: it was deleted, or the "
                f"checkpoint was saved with a different parallel layout. {OTHER_CUT}"
            )
        if not zipfile.is_zipfile(filename):  # its table of contents is at the end
            raise ValueError(
                f"{filename} is truncated, or was not written by torch.save"
            )

    def _together(self, act: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``consensus.together``, without stubs, for what comes before Megatron
        communicates.

        No vote follows: an error there would wait in it for ranks that wait for
        Megatron.
        """

        def without_stubs() -> T:
            with self._without_stubs():
                return act(*args, **kwargs)

        return together(without_stubs, self.voters, self._device)

    @property
    def _device(self) -> torch.device:
        return device_of(self.chained_optimizers[0].model_chunks)

    def _without_stubs(self) -> AbstractContextManager[None]:
        return replaced(self, chained_optimizers=parts_of(self))


def _holds_first_shard(part: Any) -> bool:
    """Whether this rank reads and writes the state of the optimizer's DP group."""
    return bool(part.data_parallel_group.rank() == 0)


def _format(kwargs: dict[str, Any]) -> str | None:
    """The format that arguments of ``sharded_state_dict`` ask for; up to core 0.12 by
    its name.
    """
    metadata = kwargs.get("metadata") or {}
    return kwargs.get("sharding_type") or metadata.get("distrib_optim_sharding_type")


def _in_whole_weights(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments of ``sharded_state_dict``, but asking for
    ``WHOLE_WEIGHTS``.
    """
    if (
        "metadata"
        not in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    ):
        return {**kwargs, "sharding_type": WHOLE_WEIGHTS}  # before core 0.13
    asked = {**(kwargs.get("metadata") or {})}
    asked["distrib_optim_sharding_type"] = WHOLE_WEIGHTS
    kept = {key: value for key, value in kwargs.items() if key != "sharding_type"}
    return {**kept, "metadata": asked}


def _for_parts(state_dict: Any, count: int) -> Any:
    """A state dict for a chain of ``count`` optimizers; with EP above 1 it has one for
    experts.

    Megatron numbers optimizers only if there are several, and loads into as many as
    were saved.
    """
    if not isinstance(state_dict, dict):
        return state_dict
    numbered = {key: value for key, value in state_dict.items() if isinstance(key, int)}
    common = {key: state_dict[key] for key in state_dict.keys() - numbered.keys()}
    if count == 1 and "optimizer" in numbered.get(0, {}):
        parts = [numbered[number] for number in sorted(numbered)]
        saved = [part["optimizer"] for part in parts if "optimizer" in part]
        return {**numbered[0], **common, "optimizer": _with_groups_of(saved)}
    if count > 1 and "optimizer" in common:
        common["optimizer"] = _with_groups_of([common["optimizer"]])
        return {at: {**common, **numbered.get(at, {})} for at in range(count)}
    return state_dict


def _with_groups_of(optimizers: list[dict[str, Any]]) -> dict[str, Any]:
    """The first optimizer's state with the groups of all, which fit dense weights and
    experts'.
    """
    groups = of_both_kinds(groups_of(optimizers))
    return {**optimizers[0], "param_groups": groups}


def _rename(states: list[dict[str, Any]], source: Source) -> None:
    """Have sharded state dicts read a checkpoint of Megatron's own Muon."""
    from megatron_muon.mcore.checkpoint.interop.foreign import renamed

    for state in states:
        state["param_state"] = renamed(state["param_state"], source)


def _refuse_mixed(tensors: set[tuple[str, bool]], group: Group | None) -> None:
    """Refuse a tensor on disk that would hold weights of both optimizers, on any of the
    ranks.
    """
    every: set[tuple[str, bool]] = set()
    for keys in all_gather_json(sorted(tensors), group):
        every.update(map(tuple, keys))
    for key, is_muon in sorted(every):
        if is_muon and (key, False) in every:
            raise NotImplementedError(
                f"the checkpoint would keep {key} of all layers in one tensor, but "
                "Muon updates some of them and AdamW others: save in another format "
                "(in Megatron-LM without --dist-ckpt-optim-fully-reshardable, before "
                "0.15 without --ckpt-fully-parallel-save), or have "
                f"{named('muon_include')} and {named('muon_exclude')} name all layers"
            )
