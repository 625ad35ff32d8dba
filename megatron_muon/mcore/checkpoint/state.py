"""The two methods through which every format of Megatron takes and gives a parameter's
state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.nn import Parameter

from megatron_muon.mcore.checkpoint.buffers import (
    ADAMW_STATE,
    MOMENTUM,
    BufferPlace,
    check_tensor,
    gathered_spans,
    home_key,
)
from megatron_muon.mcore.checkpoint.matrices import Table
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.mcore.routing.param_routing import expert_name, weights
from megatron_muon.mcore.routing.routes import Route, muons_of
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.states import MAIN_KEY, States, of_halves

if TYPE_CHECKING:
    from megatron_muon.runtime.home_state import HomeState

FromAdamW = Literal["momentum", "fresh"]


class MuonState(DistributedOptimizer):  # type: ignore[misc]
    """The state of a parameter, as all formats save and load it."""

    muon: DistributedMuon | None  # the Muon part; None in a stub
    states: States  # its main parameters and state; None in a stub
    stage_group: Any = None  # the ranks of this stage, which have the same optimizers
    ep_rank: int = 0  # for the names of experts
    local_experts: int = 0
    routes: Sequence[Route]  # of all parameters of this rank's model that train
    # of the run, the same on all ranks; None where AdamW reads Muon's checkpoint
    matrices: Table | None = None
    # the source of Muon's momentum while a checkpoint in AdamW's layout is read: see
    # switch.reading_adamw. None: the checkpoint is of this package's Muon.
    from_adamw: FromAdamW | None = None
    # the checkpoint being read has no main parameters, since the model's weights are
    # fp32 and are loaded as such
    main_is_weight: bool = False
    # AdamW reads a checkpoint of this package's Muon, and does not need the momentum
    drops_momentum: bool = False
    gathers = False  # Megatron gathers whole buffers, for which it knows Adam's names

    def _get_main_param_and_optimizer_states(
        self, model_param: Parameter
    ) -> dict[str, Tensor]:
        """In fp32, as on disk: the optimizer's own tensors, or copies, which are on the
        host.
        """
        keys = {MAIN_KEY: MAIN_KEY, **self._keys_on_disk(model_param)}
        shard = self._shard_of[model_param]
        tensors = {name: self.states.get(shard, key) for name, key in keys.items()}
        if self.states.are_copies:
            tensors = {name: x.to("cpu", copy=True) for name, x in tensors.items()}
        if not self._has_adams_names or MOMENTUM not in tensors:
            return tensors
        first, second = ADAMW_STATE
        momentum = tensors.pop(MOMENTUM)
        return {**tensors, first: momentum, second: torch.zeros_like(momentum)}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(
        self, model_param: Parameter, tensors: Mapping[str, Any]
    ) -> None:
        shard = self._shard_of[model_param]
        keys = self._keys_on_disk(model_param)
        if not self.main_is_weight:
            keys[MAIN_KEY] = MAIN_KEY
        for on_disk, key in keys.items():
            name = key if self._has_adams_names else on_disk
            check_tensor(self._name_of[model_param], name, tensors, shard.numel())
            wide = tensors[name].to(shard.device, copy=self.states.are_copies)
            if self.from_adamw is not None and key == MAIN_KEY:
                wide = self._as_main(model_param, wide)
            if self.from_adamw is not None and on_disk == MOMENTUM:
                wide = self._as_momentum(model_param, wide)
            self.states.put(shard, key, wide)

    def _as_main(self, model_param: Parameter, wide: Tensor) -> Tensor:
        """AdamW's main parameter, of which a precision-aware checkpoint has the lower
        16 bits.
        """
        if is_float8tensor(model_param) or model_param.dtype != torch.bfloat16:
            return wide
        here = self._get_model_param_range_map(model_param)["param"]
        weight = model_param.detach().view(-1)[here.start : here.end].to(wide.device)
        low = wide.to(torch.int16)
        is_low = torch.equal(low.float(), wide)
        is_whole = torch.equal(wide.to(weight.dtype), weight)
        return of_halves(weight, low) if is_low and not is_whole else wide

    def _as_momentum(self, model_param: Parameter, first_moment: Tensor) -> Tensor:
        """Muon's momentum from a first moment.

        Adam's first moment is a mean of gradients, (1-β1) Σ β1^k g; Muon's momentum is
        their sum.
        """
        if self.from_adamw == "fresh":
            return torch.zeros_like(first_moment)
        group_index, _ = self.model_param_group_index_map[model_param]
        beta1, _ = self.optimizer.param_groups[group_index]["betas"]
        return first_moment / (1.0 - float(beta1))

    @property
    def _has_adams_names(self) -> bool:
        return self.gathers or self.from_adamw is not None

    @property
    def _home_states(self) -> dict[str, HomeState]:
        """What the rule keeps at homes, by its key on disk; empty where it has
        none.
        """
        # AdamW that reads Muon's checkpoint has no rule
        rule = getattr(self.muon, "rule", None)
        if rule is None or rule.home_state is None:
            return {}
        return {home_key(self._numerics.config.rule): rule.home_state}

    @property
    def _numerics(self) -> Numerics:
        assert self.muon is not None, "the chain saves and loads no stubs"
        return self.muon.numerics

    def _keys_on_disk(self, param: Parameter) -> dict[str, str]:
        """A parameter's state: its names on disk → its names in memory."""
        if param not in self._muons:
            return {key: key for key in ADAMW_STATE}
        if self.drops_momentum:
            return {}
        return {MOMENTUM: ADAMW_STATE[0]}

    def _fill_state(self) -> None:
        """Give zeros to parameters without state: before its first step AdamW has
        none.
        """
        self.init_state_fn(self.optimizer, self.config)

    @cached_property
    def _shard_of(self) -> dict[Parameter, Tensor]:
        return dict(owned_shards(self))

    @cached_property
    def _name_of(self) -> dict[Parameter, str]:
        names = {
            weight.param: expert_name(weight.name, self.ep_rank, self.local_experts)
            for weight in weights(self.model_chunks)
        }
        twice = [name for name, count in Counter(names.values()).items() if count > 1]
        if twice:
            raise ValueError(
                f"{len(twice)} name(s) in this model belong to several parameters, "
                f"first {twice[0]}: a checkpoint cannot tell them apart, so give the "
                "modules other names"
            )
        return names

    @cached_property
    def _muons(self) -> set[Parameter]:
        """Muon's parameters, even if this rank has no slice of them."""
        return muons_of(self.routes)

    def _buffers(self) -> Iterator[tuple[int, Any, Any]]:
        """``(number, dtypes, grad buffer)``; the first two are keys of Megatron's state
        dicts.
        """
        for index, ranges in enumerate(self.gbuf_ranges):
            for dtypes in ranges:
                yield index, dtypes, self.buffers[index]

    def _places(self, index: int) -> list[BufferPlace]:
        """Places of all parameters in a grad buffer, whichever DP ranks hold their
        slices.
        """
        return [
            BufferPlace(
                self._name_of[param],
                start,
                stop,
                (MOMENTUM,) if param in self._muons else ADAMW_STATE,
            )
            for param, start, stop in gathered_spans(self.buffers[index])
        ]
