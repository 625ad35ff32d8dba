"""Muon checkpoints that others have written, and their keys in terms of this package's.

Functions of keys and of state dicts: no communication, no Megatron.

===========  ==============================  =====================================================
who          known by                        its momentum, and the factor that makes it M ← μM + G
===========  ==============================  =====================================================
moonshot     ``use_muon`` in a parameter     ``exp_avg`` beside a second moment of zeros, all as
             group                           AdamW's DistributedOptimizer lays it out; 1
megatron     ``momentum_buffer`` in a key    ``optimizer.state.momentum_buffer.WEIGHT``, whole
             of torch_dist                   weights, a mean: M ← μM + (1-μ)G; 1/(1-μ)
megatron_    files layer_wise_optimizer_N    refused: it has numbers in place of names, and does not
torch        .pt, or μ in a parameter group  say which rank had which weight
             of the format ``torch``
===========  ==============================  =====================================================

From core 0.18 on Megatron's own Muon may leave AdamW's part to a DistributedOptimizer. Its state is
in whole weights only in the format fully_reshardable.

Sources: toothacher17/Megatron-LM 8aee20bd (NVIDIA/Megatron-LM#1428), ``distrib_optimizer.py`` and
``muon.py``; NVIDIA/Megatron-LM core_v0.16.1 to main, ``layer_wise_optimizer.py`` and
``Float16OptimizerWithFloat16Params.sharded_state_dict``; NVIDIA-NeMo/Emerging-Optimizers v0.1.0 to
v0.4.0, ``OrthogonalizedOptimizer.step``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from megatron_muon.settings.config import MuonConfig

Writer = Literal["moonshot", "megatron", "megatron_torch"]
StateDict = dict[Any, Any]

MOMENTUM = "muon_momentum"  # equal to that of ``buffers``
_STATE = re.compile(r"(?:chained_\d+\.)*optimizer\.state\.([^.]+)\.(.+)$")
# Our key in fully_reshardable and fully_sharded_model_space → their keys for the same tensor. A
# DistributedOptimizer calls the main parameter "param".
_MAIN = ("fp32_param", "param")
_THEIRS = {
    MOMENTUM: ("momentum_buffer",),
    "param": _MAIN,
    "fp32_param": _MAIN,
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
}
_KNOWN = {kind for kinds in _THEIRS.values() for kind in kinds}
_IN_BUCKETS = re.compile(r"(?:chained_\d+\.)*optimizer\.distributed\.")
_MU = ("momentum", "momentum_beta")  # the latter in Emerging-Optimizers 0.1
_SGD = "dampening"  # a key of SGD's groups, which have a momentum, too
_CHAINS, _CHAIN = 4, 10_000  # how deep chains are, and how many optimizers they have, at most
_BY_RANK = re.compile(r"layer_wise_optimizer_\d+\.pt$")
# Muon's settings in their groups; this package has them in MuonConfig, once for all groups.
_MOONSHOT = ("matched_adamw_rms", "momentum", "nesterov", "ns_steps")
_NOT_OURS = (
    *_MOONSHOT,
    *("use_muon", "adamw_betas", "adamw_eps", "momentum_beta", "params"),
    "optimizer",  # its name, in Megatron's own from core 0.17 on
)


class Source:
    """A checkpoint of Megatron's own Muon, whose keys can be found by ours.

    Attributes:
        mu: the coefficient of its momentum, which is a mean.
        states: its optimizers' state dicts.
        is_fp32: its main parameters are the model's weights and have no keys of their own.
    """

    def __init__(self, keys: Iterable[str], states: Sequence[Mapping[str, Any]]) -> None:
        """Index the keys of a checkpoint.

        Args:
            keys: keys of its tensors, from ``.metadata``.
            states: its optimizers' state dicts: see ``states_of``.

        Raises:
            ValueError: the checkpoint has no μ, or several; or it has state that is neither Muon's
                nor AdamW's.
        """
        self._at: dict[tuple[str, str], str] = {}
        self._in_buckets = False
        for key in keys:
            at = _STATE.match(key)
            if at is None:
                self._in_buckets |= _IN_BUCKETS.match(key) is not None
                continue
            kind, weight = at.groups()
            if kind not in _KNOWN:
                raise ValueError(
                    f"the checkpoint, of Megatron's own Muon, has {kind} of {weight}, which "
                    "neither Muon here nor AdamW has: load the model alone (--no-load-optim)"
                )
            self._at[kind, weight] = key
        self.is_fp32 = not any(kind in _MAIN for kind, _ in self._at)
        self.states = states
        self.mu = _mu(states)

    def of(self, key: str) -> tuple[str, float]:
        """``(key there, factor)`` for one of our keys in a format that has whole weights.

        Args:
            key: ``optimizer.state.KEY.WEIGHT``, with or without ``chained_N.`` before it.

        Raises:
            ValueError: the checkpoint lacks that tensor; says which it has of the weight.
        """
        at = _STATE.match(key)
        if at is None:
            raise ValueError(f"{key} is no key of optimizer state in whole weights")
        what, weight = at.groups()
        theirs = _THEIRS[what]
        keys = [self._at[kind, weight] for kind in theirs if (kind, weight) in self._at]
        if not keys:
            there = sorted(kind for kind, name in self._at if name == weight)
            raise ValueError(
                f"the checkpoint, of Megatron's own Muon, has no {theirs[0]} of {weight}, only: "
                f"{', '.join(there) or 'nothing'}. {self._way_out(there)}"
            )
        return keys[0], 1 / (1 - self.mu) if what == MOMENTUM else 1.0

    def _way_out(self, there: Sequence[str]) -> str:
        if self._in_buckets and not there:
            return (
                "It keeps AdamW's state in flat buckets (dp_reshardable), which cannot be told "
                "apart by weights: save it there with --dist-ckpt-optim-fully-reshardable, or load "
                "the model alone (--no-load-optim)"
            )
        return (
            "Whose a weight is must be as it was there: set muon_include and muon_exclude of "
            "MuonConfig (in Megatron-LM --muon-include and --muon-exclude), or load the model "
            "alone (--no-load-optim)"
        )


def writer_of(
    keys: Collection[str], states: Sequence[Mapping[str, Any]], files: Collection[str]
) -> Writer | None:
    """The writer of a checkpoint, if it is one of the table above.

    Args:
        keys: keys of its tensors, from ``.metadata`` of torch_dist; else empty.
        states: its optimizers' state dicts: see ``states_of``.
        files: names of its files.
    """
    if any(_BY_RANK.search(file) for file in files):
        return "megatron_torch"
    if any("use_muon" in group for group in groups_of(states)):
        return "moonshot"
    if any(_SGD in group for group in groups_of(states)):
        return None
    if any(at[1] == "momentum_buffer" for at in map(_STATE.match, keys) if at):
        return "megatron"
    mus = any(key in group for group in groups_of(states) for key in _MU)
    return "megatron_torch" if mus and not keys else None


def states_of(saved: Any) -> list[StateDict]:
    """The state dicts of an optimizer, or of a chain, which is a list or has numbers for keys.

    Raises:
        ValueError: chains are nested too deep or have too many optimizers, as in a damaged file.
    """
    states = [saved]
    for _ in range(_CHAINS):
        if not any(map(_is_chain, states)):
            return [state for state in states if isinstance(state, dict)]
        if sum(len(state) if _is_chain(state) else 1 for state in states) > _CHAIN:
            break
        states = [each for state in states for each in _chained(state)]
    raise ValueError(f"the optimizer is no state dict and no chain of up to {_CHAIN} of them")


def _is_chain(saved: Any) -> bool:
    if isinstance(saved, dict):
        return bool(saved) and all(isinstance(key, int) for key in saved)
    return isinstance(saved, list)


def _chained(saved: Any) -> list[Any]:
    if not _is_chain(saved):
        return [saved]
    return saved if isinstance(saved, list) else [saved[number] for number in sorted(saved)]


def refuse(writer: Writer) -> None:
    """Refuse a checkpoint that cannot be loaded.

    Raises:
        ValueError: says what the checkpoint lacks.
    """
    if writer == "megatron_torch":
        raise ValueError(
            "the checkpoint is of Megatron's own Muon in the format torch: its optimizer state "
            "(layer_wise_optimizer_N.pt, where ranks share it) is by number and not by name, and "
            "nothing says which weights rank N had. Save it with --ckpt-format torch_dist, or load "
            "the model alone (--no-load-optim)"
        )


def as_ours(states: Sequence[Mapping[str, Any]], config: MuonConfig) -> StateDict:
    """A state dict for ``MuonCheckpoint.load_state_dict``, without the tensors.

    Args:
        states: their optimizers' state dicts.
        config: our settings, assumed where their checkpoint does not give a setting.

    Raises:
        ValueError: their Muon groups have several values of one setting.
    """
    steps = [group["step"] for group in groups_of(states) if "step" in group]
    steps += [step for state in states if (step := _common_step(state)) is not None]
    adamw = _adamw(states)
    groups = [
        {
            **adamw,
            **{key: value for key, value in group.items() if key not in _NOT_OURS},
            "step": max(steps, default=0),
        }
        for group in groups_of(states)
    ]
    theirs = _settings(states)
    settings = {**dataclasses.asdict(config), **theirs}
    ours: StateDict = {
        "optimizer": {"param_groups": groups},
        "megatron_muon": {"format": 1, "settings": settings},
    }
    scalers = [state["grad_scaler"] for state in states if state.get("grad_scaler")]
    return {**ours, **({"grad_scaler": scalers[0]} if scalers else {})}


def renamed(state: Any, source: Source) -> Any:
    """A copy of a sharded state dict to be loaded, with the keys of Megatron's own Muon.

    It leaves out main parameters that are the model's weights, so no key is loaded twice.

    Args:
        state: ``param_state`` of a sharded state dict in a format that has whole weights.
        source: the checkpoint.

    Raises:
        ValueError: the checkpoint lacks a tensor.
    """
    if isinstance(state, dict):
        left_out = _MAIN if source.is_fp32 else ()
        return {name: renamed(v, source) for name, v in state.items() if name not in left_out}
    return (
        dataclasses.replace(state, key=source.of(state.key)[0]) if hasattr(state, "key") else state
    )


def converted(
    loaded: Mapping[Any, Any], source: Source, config: MuonConfig, sharding_type: str
) -> StateDict:
    """A state dict for ``load_state_dict``, from the result of a load with ``renamed`` keys.

    Args:
        loaded: the optimizer's part of that result: our ``param_state``, here or for each optimizer
            of a chain, beside their state dicts. Momentum is made a sum in place.
        source: the checkpoint.
        config: our settings.
        sharding_type: the format in which our ``param_state`` was asked for.

    Raises:
        ValueError: see ``as_ours``.
    """
    kept = {**as_ours(source.states, config), "param_state_sharding_type": sharding_type}
    parts: StateDict = {
        key: {**kept, "param_state": _scaled(part["param_state"], source)}
        for key, part in [(None, loaded), *loaded.items()]
        if isinstance(part, Mapping) and "param_state" in part
    }
    only: StateDict | None = parts.get(None)
    return parts if only is None else only


def _scaled(state: Mapping[Any, Any], source: Source) -> StateDict:
    """The same tensors, with momentum made a sum in place, to save the memory of a copy."""
    for tensors in state.values():
        if MOMENTUM in tensors:
            tensors[MOMENTUM].mul_(1 / (1 - source.mu))
    return dict(state)


def moonshot_owner(momentum_is_zero: bool, second_moment_is_zero: bool) -> str | None:
    """A weight's optimizer in Moonshot's checkpoint: ``muon``, ``adamw``, or None if unknown.

    The flat buffers do not name it, but Moonshot writes zeros for Muon's second moment.
    """
    if not second_moment_is_zero:
        return "adamw"
    return None if momentum_is_zero else "muon"


def groups_of(states: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The parameter groups in all of the state dicts."""
    for state in states:
        yield from _inner(state).get("param_groups", ())


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict of torch's optimizer; FP32Optimizer saves it without a wrapper."""
    inner = state.get("optimizer", state)
    return inner if isinstance(inner, Mapping) else {}


def _adamw(states: Sequence[Mapping[str, Any]]) -> StateDict:
    """AdamW's hyperparameters, which every group needs but their Muon groups may lack."""
    hyperparameters: StateDict = {"bias_correction": True}
    for group in groups_of(states):
        for key in ("bias_correction", "betas", "eps"):
            for name in (f"adamw_{key}", key):
                if name in group:
                    hyperparameters[key] = group[name]
    return hyperparameters


def _common_step(state: Mapping[str, Any]) -> Any:
    """The step of torch's AdamW, which Megatron keeps beside its parameters' state."""
    kept = _inner(state).get("state")
    return kept.get("common_step") if isinstance(kept, Mapping) else None


def _settings(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Muon's settings in their groups, by our names."""
    muons = [group for group in groups_of(states) if group.get("use_muon")]
    if not muons:
        return {"momentum": _mu(states)}
    settings: dict[str, Any] = {}
    for name in _MOONSHOT:
        values = [group[name] for group in muons if name in group]
        if any(value != values[0] for value in values):
            raise ValueError(f"the checkpoint's Muon groups have several {name}: {values}")
        settings |= {name: values[0]} if values else {}
    return settings


def _mu(states: Sequence[Mapping[str, Any]]) -> float:
    momenta = {float(group[key]) for group in groups_of(states) for key in _MU if key in group}
    if len(momenta) != 1:
        raise ValueError(
            "the checkpoint, of Megatron's own Muon, must say one momentum coefficient in its "
            f"parameter groups, to make a sum of its mean; it says {sorted(momenta) or 'none'}"
        )
    (mu,) = momenta
    return mu
