"""Checkpoints of Megatron's own Muon, and their keys in terms of this package's.

Functions of keys and of state dicts: no communication, no Megatron.

In torch_dist it has state of whole weights, ``optimizer.state.momentum_buffer.WEIGHT``.
Momentum is a mean, M ← μM + (1-μ)G, and 1/(1-μ) makes it the sum M ← μM + G. In the
format ``torch`` state has numbers, in files layer_wise_optimizer_N.pt, which do not say
which rank had which weight. The proof of concept has zeros in place of a second moment,
and ``use_muon`` in its groups.

From core 0.18 on Megatron's own Muon may leave AdamW's part to a DistributedOptimizer.
Its state is in whole weights only in the format fully_reshardable.

Sources: NVIDIA/Megatron-LM#1428; core_v0.16.1 to main, ``layer_wise_optimizer.py`` and
``Float16OptimizerWithFloat16Params.sharded_state_dict``;
NVIDIA-NeMo/Emerging-Optimizers v0.1.0 to v0.4.0, ``OrthogonalizedOptimizer.step``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_muon.mcore.checkpoint.buffers import (
    CHOICES,
    FORMAT,
    MOMENTUM,
    RECORD,
    groups_of,
    inner_state,
    of_both_kinds,
)
from megatron_muon.settings.config import MuonConfig, named

StateDict = dict[Any, Any]
StateDicts = Sequence[Mapping[str, Any]]

_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)$")
# Our key in fully_reshardable and fully_sharded_model_space → their keys for the same
# tensor. A DistributedOptimizer calls the main parameter "param".
_MAIN = ("fp32_param", "param")
_THEIRS = {
    MOMENTUM: ("momentum_buffer",),
    "param": _MAIN,
    "fp32_param": _MAIN,
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
}
_KNOWN = set[str]().union(*_THEIRS.values())
_NOT_READ = "moment2_buffer"  # of their adaptive_muon
_IN_BUCKETS = re.compile(r"(?:chained_\d+\.)*optimizer\.distributed\.")
_MU = ("momentum", "momentum_beta")  # the latter in Emerging-Optimizers 0.1
_SGD = "dampening"  # a key of SGD's groups, which have a momentum, too
_BY_RANK = re.compile(r"layer_wise_optimizer_\d+\.pt$")
# What their groups have and ours do not: Muon's settings, and from core 0.17 on a name.
_NOT_OURS = (*_MU, "nesterov", "params", "optimizer")


class Source:
    """A checkpoint of Megatron's own Muon; finds its key for each key of ours.

    Attributes:
        mu: the coefficient of its momentum, which is a mean.
        states: its optimizers' state dicts.
        is_fp32: its main parameters are the model's weights, so they have no keys.
    """

    def __init__(self, keys: Collection[str], states: StateDicts) -> None:
        """Index the keys of a checkpoint's tensors; ValueError for state of another
        optimizer.
        """
        self._at: dict[tuple[str, str], str] = {}
        self._in_buckets = any(_IN_BUCKETS.match(key) for key in keys)
        for at in filter(None, map(_STATE.match, keys)):
            kind, weight = at.groups()
            if kind == _NOT_READ:
                continue
            if kind not in _KNOWN:
                raise ValueError(
                    f"the checkpoint, of Megatron's own Muon, has {kind} of {weight}, "
                    "which neither Muon here nor AdamW has: load the model alone "
                    "(--no-load-optim)"
                )
            self._at[kind, weight] = at[0]
        self.is_fp32 = not any(kind in _MAIN for kind, _ in self._at)
        self.states = states
        self.mu = _mu(states)

    def of(self, key: str) -> str:
        """The key there for one of ours, of whole weights; a ValueError if it is not
        there.
        """
        at = _STATE.match(key)
        assert at is not None, key
        what, weight = at.groups()
        theirs = _THEIRS[what]
        keys = [self._at[kind, weight] for kind in theirs if (kind, weight) in self._at]
        if keys:
            return keys[0]
        there = ", ".join(sorted(kind for kind, name in self._at if name == weight))
        way_out = (
            "Each parameter must belong to the same optimizer as in that checkpoint: "
            f"set {named('muon_include')} and {named('muon_exclude')} accordingly"
        )
        if self._in_buckets and not there:
            way_out = (
                "AdamW's state is in flat buckets (dp_reshardable), which cannot be "
                "told apart by weights: save it there with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        raise ValueError(
            f"the checkpoint, of Megatron's own Muon, has no {theirs[0]} of {weight}, "
            f"only: {there or 'nothing'}. {way_out}, or load the model alone "
            "(--no-load-optim)"
        )


def is_megatrons(
    keys: Collection[str], states: StateDicts, files: Collection[str]
) -> bool:
    """Whether Megatron's own Muon has written a checkpoint, in whole weights.

    ``keys`` are those of its tensors in torch_dist; else none.

    Raises:
        ValueError: another Muon's optimizer state, which cannot be told apart by
            weights.
    """
    group_keys = set[str]().union(*groups_of(states))
    is_sgd = _SGD in group_keys
    has_mu = not is_sgd and not group_keys.isdisjoint(_MU)
    if (
        any(_BY_RANK.search(file) for file in files)
        or "use_muon" in group_keys
        or (has_mu and not keys)
    ):
        raise ValueError(
            "The checkpoint's optimizer state does not say which weights were Muon's: "
            "it was saved by Megatron's own Muon in the format torch, or by the proof "
            "of concept of Distributed Muon (Megatron-LM#1428). Save it with "
            "--ckpt-format torch_dist, or load the model alone (--no-load-optim)"
        )
    return not is_sgd and any(
        at[1] == "momentum_buffer" for at in map(_STATE.match, keys) if at
    )


def as_ours(states: StateDicts, config: MuonConfig) -> StateDict:
    """A state dict for ``MuonCheckpoint.load_state_dict``, without the tensors.

    Its groups fit the dense and the experts' optimizer, however Megatron split them.
    """
    steps = [group["step"] for group in groups_of(states) if "step" in group]
    for state in states:
        shards = inner_state(state).get("state")
        # where torch's AdamW has its step
        if isinstance(shards, Mapping) and "common_step" in shards:
            steps.append(shards["common_step"])
    adamw = _adamw(states)
    groups = []
    for group in groups_of(states):
        kept = {key: value for key, value in group.items() if key not in _NOT_OURS}
        groups.append({**adamw, **kept, "step": max(steps, default=0)})
    ours: StateDict = {
        "optimizer": {"param_groups": of_both_kinds(groups)},
        RECORD: {
            "format": FORMAT,
            "choices": CHOICES,
            "settings": {**dataclasses.asdict(config), "momentum": _mu(states)},
        },
    }
    scalers = [state["grad_scaler"] for state in states if state.get("grad_scaler")]
    if scalers:
        ours["grad_scaler"] = scalers[0]
    return ours


def renamed(state: Any, source: Source) -> Any:
    """A copy of ``param_state`` of a sharded state dict to be loaded, with keys of the
    source.

    It is in a format that has whole weights. It lacks main parameters that are the
    model's weights, so no key is loaded twice.
    """
    if hasattr(state, "key"):
        return dataclasses.replace(state, key=source.of(state.key))
    if not isinstance(state, dict):
        return state
    omitted = _MAIN if source.is_fp32 else ()
    return {
        name: renamed(value, source)
        for name, value in state.items()
        if name not in omitted
    }


def converted(
    loaded: Mapping[Any, Any], source: Source, config: MuonConfig, sharding_type: str
) -> StateDict:
    """A state dict for ``load_state_dict``, from the result of a load with ``renamed``
    keys.

    ``loaded`` is the optimizer's part of that result: our ``param_state``, here or for
    each optimizer of a chain, beside their state dicts. Momentum becomes a sum in
    place.
    """
    ours = as_ours(source.states, config)
    ours["param_state_sharding_type"] = sharding_type
    if "param_state" in loaded:
        return _with_sums(ours, loaded, source)
    return {
        number: _with_sums(ours, part, source)
        for number, part in loaded.items()
        if isinstance(part, Mapping) and "param_state" in part
    }


def _with_sums(ours: StateDict, part: Mapping[Any, Any], source: Source) -> StateDict:
    for tensors in part["param_state"].values():
        if MOMENTUM in tensors:
            tensors[MOMENTUM].mul_(1 / (1 - source.mu))
    return {**ours, "param_state": dict(part["param_state"])}


def _adamw(states: StateDicts) -> StateDict:
    """AdamW's hyperparameters, which every group needs but their Muon groups may
    lack.
    """
    hyperparameters: StateDict = {"bias_correction": True}
    for group in groups_of(states):
        keys = ("bias_correction", "betas", "eps")
        hyperparameters |= {key: group[key] for key in keys if key in group}
    return hyperparameters


def _mu(states: StateDicts) -> float:
    momenta: set[float] = set()
    for group in groups_of(states):
        momenta.update(float(group[key]) for key in _MU if key in group)
    if len(momenta) != 1:
        raise ValueError(
            "Cannot convert the momentum of Megatron's own Muon: all of its parameter "
            "groups must have one momentum coefficient, but they have "
            f"{sorted(momenta) or 'none'}"
        )
    (mu,) = momenta
    return mu
