"""Saving and loading Muon's optimizer state in the formats that Megatron has for
AdamW's.

Megatron's own code does the work. All its formats take a parameter's state from one
method and give it back through another. Megatron's methods know Adam's two names; those
here know Muon's state. A checkpoint has the fp32 main parameter and fp32 momentum
(``muon_momentum``) of each of Muon's parameters, and for AdamW's what Megatron writes.
No zeros stand in for Muon's second moment:

=============================================  =============================  ====================
format                                         main parameters                state
=============================================  =============================  ====================
``torch``; dp_zero_gather_scatter              as Megatron: a flat tensor     by parameter name: see
                                               for each grad buffer           ``buffers``
dp_reshardable (0.15 and later)                a flat tensor for each         likewise
                                               parameter, (1)
fully_reshardable (0.15 and later);            as Megatron: a tensor like     as Megatron, (2)
fully_sharded_model_space (before 0.15)        the parameter
=============================================  =============================  ====================

(1) The key is ``optimizer.distributed.dp_group_idx_N.megatron_muon.KEY.PARAMETER``.
Megatron has a tensor per bucket; with one per parameter, buckets and the order of
parameters in them may change. (2) The key is ``optimizer.state.KEY.PARAMETER``.
PARAMETER may stand for a weight of all layers, which must then all be Muon's or all
AdamW's. KEY is muon_momentum, or exp_avg and exp_avg_sq, and in (1) also param.

A record of Muon's settings is beside the parameter groups. Every rank refuses a
checkpoint without it, or without the state of one parameter. A Megatron without the
plugin, or AdamW with it, cannot load Muon's checkpoint: it asks for ``exp_avg`` of
Muon's parameters, which is not there.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_muon.mcore.checkpoint.buffers import (
    ADAMW_STATE,
    AT_DP_ZERO,
    OTHER_CUT,
    RECORD,
    check_tensor,
    from_disk,
    other_units,
    to_disk,
)
from megatron_muon.mcore.checkpoint.param_groups import (
    as_megatron_pairs,
    check_record,
    loaded_groups,
    record,
)
from megatron_muon.mcore.checkpoint.sharded import ShardedState, StateDict
from megatron_muon.runtime.patches import replaced


class MuonCheckpoint(ShardedState):
    """The checkpoint part of a MuonDistributedOptimizer."""

    half_loaded = False  # a load has changed something and is not complete
    # of this rank, between check and scatter
    _to_scatter: tuple[StateDict | None] | None = None

    @property
    def record(self) -> StateDict:
        """The record of Muon in a checkpoint."""
        return record(self._numerics, self.matrices)

    def state_dict(self) -> StateDict:
        """Megatron's state dict, without parameters' state, plus the record of Muon's
        settings.
        """
        self._fill_state()
        state: StateDict = super().state_dict()
        # no load takes the hybrid one's classes
        for group in state["optimizer"]["param_groups"]:
            for key in [key for key, value in group.items() if isinstance(value, type)]:
                del group[key]
        # AdamW's checkpoint, which Megatron is to read, has no record
        if self.from_adamw is None:
            state[RECORD] = self.record
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Check the state dict, pair its groups with ours, and load it by Megatron's
        method.

        It does not communicate: what dp_zero_gather_scatter scatters waits for
        ``scatter``.
        """
        self._to_scatter = None
        if self.from_adamw is None and not self.drops_momentum:
            check_record(state_dict, self._numerics, self.matrices)
        homes = self._home_states
        for key, home in homes.items():
            if state_dict.get(key):
                home.require_usable(state_dict[key], other_units(key))
        saved = state_dict["optimizer"]
        ours = self.optimizer.param_groups
        loaded = loaded_groups(ours, saved["param_groups"])
        groups = as_megatron_pairs(ours, loaded)
        self._fill_state()
        self.half_loaded = True
        super().load_state_dict(
            {**state_dict, "optimizer": {**saved, "param_groups": groups}}
        )
        format = state_dict.get("param_state_sharding_type", AT_DP_ZERO)
        for key, home in homes.items() if format != AT_DP_ZERO else ():
            home.load(state_dict.get(key) or None)
        for group, values in zip(self.optimizer.param_groups, loaded, strict=True):
            group.update(values)  # Megatron confuses similar groups
        # after a load the shards of torch's AdamW share one step
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def make_ready(self) -> None:
        """Do what may fail on one rank alone before Megatron gathers."""
        self._fill_state()
        _ = self._name_of

    def get_parameter_state_dp_zero(
        self, *args: Any, **kwargs: Any
    ) -> StateDict | None:
        """All state of the DP group, gathered to its first rank, or to all ranks if
        asked.
        """
        self._fill_state()
        with replaced(self, gathers=True):
            gathered: StateDict | None = super().get_parameter_state_dp_zero(
                *args, **kwargs
            )
        if self.from_adamw is not None:
            return gathered
        if self._to_be_cut is not None:
            return self._kept_for_cutting(gathered)
        if gathered:
            for index, dtypes, _ in self._buffers():
                # empty where an old Megatron returns it on other ranks
                if gathered[index][dtypes]:
                    whole = gathered[index][dtypes]
                    gathered[index][dtypes] = to_disk(whole, self._places(index))
        for key, home in self._home_states.items():
            every = home.gathered(self.stage_group)
            if gathered and self.data_parallel_group.rank() == 0:
                gathered[key] = {name: x.cpu() for name, x in every.items()}
        return gathered

    def load_parameter_state_from_dp_zero(
        self, state_dict: StateDict | None, *, update_legacy_format: bool = False
    ) -> None:
        """Check state that the DP group's first rank is to ``scatter``. No
        communication.
        """
        if update_legacy_format:
            raise NotImplementedError(
                "no Muon checkpoint has the format that "
                "--ckpt-convert-update-legacy-dist-opt-format reads: omit it"
            )
        reads = self.data_parallel_group.rank() == 0
        self._to_scatter = (self._from_disk(state_dict) if reads else None,)

    def scatter(self) -> None:
        """Scatter what has been checked, if anything has. Every rank of the stage calls
        it.
        """
        if self._to_scatter is not None:
            (state,) = self._to_scatter
            self._to_scatter = None
            self.half_loaded = True
            reads = dist.get_rank(self.stage_group) == 0
            homes = self._home_states
            saved = {key: state.pop(key, None) for key in homes} if state else {}
            with replaced(self, gathers=True):
                super().load_parameter_state_from_dp_zero(state)
            for key, home in homes.items():
                home.load_from_one(saved.get(key) if reads else None, self.stage_group)

    def sharded_param_state_dp_zero(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's state for dp_zero_gather_scatter; refused with several
        instances.
        """
        if self.ddp_config.num_distributed_optimizer_instances > 1:
            raise NotImplementedError(
                "Megatron reads dp_zero_gather_scatter into the first of several "
                "optimizer instances only: save in another format (in Megatron-LM "
                "before 0.15 --ckpt-fully-parallel-save, after it without "
                "--dist-ckpt-save-pre-mcore-014)"
            )
        return super().sharded_param_state_dp_zero(*args, **kwargs)

    def _from_disk(self, saved: StateDict | None) -> StateDict:
        if saved is None:
            raise ValueError("the checkpoint has no optimizer state for this rank")
        # a chain with experts saves a list
        state = dict(saved) if isinstance(saved, dict) else {}
        for key, home in self._home_states.items():
            if state.get(key) is not None:
                home.require_usable(state[key], other_units(key), whole=True)
        for index, dtypes, buffer in self._buffers():
            saved_buffer = state.get(index, {}).get(dtypes)
            if saved_buffer is None:
                raise ValueError(
                    f"The checkpoint has no optimizer state for grad buffer {index} "
                    f"({dtypes}): it was saved with a different model, precision or "
                    f"parallel layout. {OTHER_CUT}"
                )
            if self.from_adamw is None:
                gathered = from_disk(
                    saved_buffer, self._places(index), buffer.numel_unpadded
                )
                state[index] = {**saved[index], dtypes: gathered}
                continue
            for key in ("param", *ADAMW_STATE):
                check_tensor(
                    f"grad buffer {index}", key, saved_buffer, buffer.numel_unpadded
                )
        return state
