"""Muon's state in the torch_dist formats in which every rank writes and reads its own
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_muon.mcore.checkpoint.buffers import (
    ADAMW_STATE,
    AT_DP_ZERO,
    MOMENTUM,
    RECORD,
    BufferPlace,
)
from megatron_muon.mcore.checkpoint.state import MuonState
from megatron_muon.runtime.patches import replaced

StateDict = dict[Any, Any]


class ShardedState(MuonState):
    """dp_reshardable, fully_reshardable and fully_sharded_model_space: see
    ``formats``.
    """

    # state that Megatron has gathered for fully_reshardable
    _to_be_cut: StateDict | None = None
    # For the last state dict in whole weights: (key of a tensor on disk, whether the
    # weight is Muon's). One such tensor may hold a weight of all layers or experts.
    tensors: frozenset[tuple[str, bool]] = frozenset()

    # numbers of all homes of the stage, gathered for a save
    _of_homes: dict[str, dict[str, torch.Tensor]] | None = None

    # --- what rules keep at homes, in all of these formats

    def gather_home_state(self) -> None:
        """Gather for ``sharded_state_dict``. Every rank of the stage calls it."""
        self._of_homes = {
            key: home.gathered(self.stage_group)
            for key, home in self._home_states.items()
        }

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> StateDict:
        """Megatron's, with the numbers that rules keep at homes."""
        state: StateDict = super().sharded_state_dict(
            model_sharded_state_dict, is_loading, **kwargs
        )
        gathered, self._of_homes = self._of_homes, None
        if state.get("param_state_sharding_type") == AT_DP_ZERO:
            return state
        instance = self.distributed_optimizer_instance_id
        assert is_loading or gathered is not None, "the chain gathers it for a save"
        for key, home in self._home_states.items():
            state[key] = {}
            for name, (length, number) in home.wanted().items():
                state[key][name] = ShardedTensor.from_rank_offsets(
                    f"optimizer.state.{key}.{name}",
                    torch.empty(length) if gathered is None else gathered[key][name],
                    replica_id=(instance, 0, number),
                )
        return state

    # --- dp_reshardable, of Megatron 0.15 and later: a rank's slices as they are

    def sharded_param_state_dp_reshardable(
        self, *args: Any, **kwargs: Any
    ) -> StateDict:
        """Megatron's structure, with flat tensors per parameter, since buckets may
        change.
        """
        self._refuse_empty_shards()
        state: StateDict = super().sharded_param_state_dp_reshardable(*args, **kwargs)
        if self.from_adamw is not None:
            return state
        group = f"dp_group_idx_{self.data_parallel_group_idx}"
        prefix = f"optimizer.distributed.{group}.{RECORD}"
        for index, dtypes, _ in self._buffers():
            ranges = self.gbuf_ranges[index][dtypes]
            for entries, bucket in zip(state[index][dtypes], ranges, strict=True):
                entries[:] = [
                    entry for entry in entries if not entry["padding"].unwrap()
                ]
                places = bucket["param_map"].items()
                for entry, (param, place) in zip(entries, places, strict=True):
                    for key in entry.keys() - {"padding"}:
                        entry[key] = replace(
                            entry[key],
                            key=f"{prefix}.{key}.{self._name_of[param]}",
                            global_shape=(param.nelement(),),
                            global_offset=(place["param"].start,),
                        )
        return state

    def _refuse_empty_shards(self) -> None:
        """Raise where Megatron would fail an assertion, and name the way out."""
        for index, dtypes, buffer in self._buffers():
            for number, bucket in enumerate(self.gbuf_ranges[index][dtypes]):
                if not bucket["param_map"]:
                    raise NotImplementedError(
                        "Megatron's dp_reshardable cannot save or load bucket "
                        f"{number} with {buffer.buckets[number].numel_unpadded} "
                        "elements, of which this DP rank has none: take larger buckets "
                        "(in Megatron-LM --ddp-bucket-size) or another format "
                        "(--dist-ckpt-optim-fully-reshardable)"
                    )

    def load_parameter_state_from_dp_reshardable(self, state_dict: StateDict) -> None:
        """Load a rank's slices; other buckets than at the save do not matter to Muon's
        format.
        """
        if self.from_adamw is None:
            here = {"per_bucket_numel_unpadded": self.per_bucket_numel_unpadded}
            state_dict = {**state_dict, **here}
        super().load_parameter_state_from_dp_reshardable(state_dict)

    # --- fully_reshardable, of Megatron 0.15 and later: whole parameters

    def sharded_param_state_fully_reshardable(
        self, *args: Any, **kwargs: Any
    ) -> StateDict | None:
        """Megatron's state, cut anew (see ``gathered_spans``); AdamW's is read as
        written.
        """
        self.tensors = frozenset()
        make = super().sharded_param_state_fully_reshardable
        if self.from_adamw is not None:
            state: StateDict | None = make(*args, **kwargs)
            return state
        with replaced(self, _to_be_cut={}):
            state = make(*args, **kwargs)
            return None if state is None else self._cut_anew(state)

    def _cut_anew(self, state: StateDict) -> StateDict:
        """The same ShardedTensors, of what was gathered, by the names on disk."""
        cut: StateDict = {}
        for number, (whole, place) in enumerate(self._cuts()):
            cut[number] = {}
            names = zip(("param", *place.keys), ("param", *ADAMW_STATE), strict=False)
            for name, source in names:
                like = state[number][source]
                piece = whole[source][place.start : place.stop]
                cut[number][name] = replace(
                    like,
                    key=like.key.replace(f".{source}.", f".{name}.", 1),
                    data=piece.reshape(like.data.shape),
                )
        self.tensors = frozenset(
            (tensors["param"].key, MOMENTUM in tensors) for tensors in cut.values()
        )
        return cut

    def _kept_for_cutting(self, gathered: StateDict | None) -> StateDict | None:
        """Keep the gathered state; returns expanded zeros, long enough for Megatron to
        cut.
        """
        if gathered is None:
            return None
        assert self._to_be_cut is not None
        self._to_be_cut.update(gathered)
        zeros = dict(gathered)
        for index, dtypes, buffer in self._buffers():
            numel = sum(bucket.grad_data.numel() for bucket in buffer.buckets)
            long = torch.zeros(1).expand(numel)
            whole = gathered[index][dtypes].items()
            like = {k: long if torch.is_tensor(value) else value for k, value in whole}
            zeros[index] = {dtypes: like}
        return zeros

    def _cuts(self) -> Iterator[tuple[StateDict, BufferPlace]]:
        """The gathered tensors that have a parameter, and its place in them, in the
        order of Megatron's result.
        """
        assert self._to_be_cut
        for index, dtypes, _ in self._buffers():
            for place in self._places(index):
                yield self._to_be_cut[index][dtypes], place

    # --- fully_sharded_model_space, of Megatron up to 0.14: ranges of whole parameters

    def sharded_param_state_fs_model_space(
        self, *args: Any, **kwargs: Any
    ) -> StateDict:
        """Megatron's state; notes the ``tensors``."""
        state: StateDict = super().sharded_param_state_fs_model_space(*args, **kwargs)
        self.tensors = frozenset(
            (tensors["fp32_param"].key, MOMENTUM in tensors)
            for tensors in state.values()
        )
        return state

    # --- fully_sharded_bucket_space, of Megatron up to 0.14, deprecated there

    def sharded_param_state_fs_bucket_space(
        self, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refused: no option of Megatron-LM leads here."""
        raise NotImplementedError(
            "optimizer='muon' does not save or load fully_sharded_bucket_space, which "
            "Megatron calls deprecated: use fully_sharded_model_space (in Megatron-LM "
            "--ckpt-fully-parallel-save) or dp_zero_gather_scatter"
        )
