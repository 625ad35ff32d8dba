"""Muon's data in a checkpoint beside its tensors: the record of its settings, and the
groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import distrib_optimizer

from megatron_muon.console import printable, say
from megatron_muon.mcore.checkpoint.buffers import CHOICES, FORMAT, RECORD
from megatron_muon.mcore.checkpoint.matrices import (
    Table,
    require_record,
    require_same_matrices,
)
from megatron_muon.mcore.routing.param_routing import GROUP_SETTINGS, LR_MULTIPLIER
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.settings import left
from megatron_muon.settings.coefficients import as_run, canonical, parse, spelled
from megatron_muon.settings.config import ROWS, MuonConfig, named

Group = dict[str, Any]
Settings = Mapping[str, Any]  # of a record, by the names of MuonConfig's fields

# Keys that pair saved groups with ours: the required ones must agree; the preferred
# ones decide, in this order, between several groups.
_REQUIRED = ("is_expert_parallel", "is_decoupled_lr", "lr_mult")
# ``default_config`` tells groups with a decoupled rate apart from core 0.16 on.
_PREFERRED = (
    GROUP_SETTINGS,
    LR_MULTIPLIER,
    "wd_mult",
    "default_config",
    "max_lr",
    "min_lr",
)

# No bit of a run or of its checkpoint depends on these themselves. Where they change
# another setting's default, the record has that setting's value. Homes may be auto in
# records of 0.2.0.
_OTHERS = ("nonfinite_limit", "log_interval", "preset", "homes")

# Settings that another optimizer's checkpoint does not say, and their values then.
_UNSAID = {
    "ns_iteration": None,
    "ns_dtype": None,
    "split_matrices": None,
}

# Keys of a group that overrule a schedule's own values.
SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")
# By the key that says how a run has changed a group: the keys that it has changed.
_CHANGED = {
    LR_MULTIPLIER: ("lr_mult", "max_lr", "min_lr"),
    GROUP_SETTINGS: ("lr_mult", *SCHEDULE),
}


def record(numerics: Numerics, matrices: Table | None = None) -> Group:
    """The record of Muon's settings and matrices that is saved, the same on every
    rank.
    """
    return {
        "format": FORMAT,
        "choices": CHOICES,
        "settings": _resolved(numerics),
        "matrices": matrices,
    }


def check_record(
    saved: Mapping[str, Any], numerics: Numerics, matrices: Table | None = None
) -> None:
    """Refuse a state dict that is not Muon's, or of other matrices; print on rank 0
    which settings have changed.
    """
    recorded = saved.get(RECORD)
    if recorded is None:
        raise ValueError(
            "the checkpoint's optimizer state was not saved by megatron_muon's Muon "
            f"(it has no {RECORD!r} in it): load the model alone (in Megatron-LM "
            "--no-load-optim or --finetune), or choose the optimizer that saved it"
        )
    format = recorded.get("format") if isinstance(recorded, Mapping) else recorded
    if not isinstance(recorded, Mapping) or format != FORMAT:
        raise ValueError(
            "the checkpoint's optimizer state is of format "
            f"{format!r}, this megatron_muon reads {FORMAT}: use the megatron_muon "
            "that saved it"
        )
    require_record(recorded)
    require_same_matrices(recorded, record(numerics, matrices), "the checkpoint")
    # An older megatron_muon that lacked a setting did what is now its default.
    default = MuonConfig(ns_iteration="standard", ns_dtype="bf16", split_matrices="off")
    then = {**_resolved(Numerics(default, numerics.device)), **recorded["settings"]}
    now = _resolved(numerics)
    then |= {name: now[name] for name, value in _UNSAID.items() if then[name] == value}
    coefficients = then["ns_coefficients"]  # perhaps numbers, or a removed set's name
    if isinstance(coefficients, str) and coefficients in left.SETS:
        coefficients = parse(left.SETS[coefficients])
    try:
        then["ns_coefficients"] = canonical(coefficients)
        used = _as_run(then)
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError(
            f"the record of Muon's settings is damaged: {named('ns_coefficients')} is "
            f"{coefficients!r}, {named('ns_steps')} {then['ns_steps']!r}"
        ) from None
    _refuse_set_cut_short(then, now)
    then = used
    unknown = "nothing: this megatron_muon has no such setting"
    for name in sorted((then.keys() | now.keys()) - set(_OTHERS)):
        before = then.get(name, unknown)
        after = now.get(name, unknown)
        if before != after and dist.get_rank() == 0:
            setting = named(name) if name in now else printable(name)
            keeps = ""
            if getattr(numerics.config, name, "") is None and before is not None:
                keeps = f": {ROWS[name].flags[0].option} {before} keeps its bits"
            say(
                f"[megatron_muon] {setting} is {after!r} now; the checkpoint was saved "
                f"with {before!r}{keeps}"
            )
    chosen = [
        name for name in ("split_matrices", "ns_iteration") if now[name] == "auto"
    ]
    if chosen and recorded.get("choices", 1) != CHOICES and dist.get_rank() == 0:
        say(
            f"[megatron_muon] {' and '.join(map(named, chosen))} auto: the "
            "megatron_muon that saved the checkpoint chose by other rules. Where this "
            "one shares other matrices or takes another iteration, steps round "
            "differently"
        )


def config_of(settings: Settings) -> MuonConfig:
    """The settings of a record that say which weights were Muon's; the others, which
    may have left since, are the defaults.
    """
    routing = ("muon_include", "muon_exclude")
    return MuonConfig(**{name: settings[name] for name in routing if name in settings})


def _as_run(settings: Settings) -> Group:
    """A record's settings without those that left; a set that was cut short is what its
    steps were.
    """
    default = MuonConfig()
    steps = settings.get("ns_steps", default.ns_steps)
    used = as_run(settings.get("ns_coefficients", default.ns_coefficients), steps)
    kept = {name: settings[name] for name in settings.keys() - left.FIELDS.keys()}
    return {**kept, "ns_coefficients": used}


def _refuse_set_cut_short(then: Group, now: Group) -> None:
    """Refuse to go on with all steps of a set of which 0.2.0 and earlier ran fewer."""
    name, steps = then["ns_coefficients"], then["ns_steps"]
    used = _as_run(then)["ns_coefficients"]
    if name != now["ns_coefficients"] or used == name:
        return
    raise ValueError(
        f"the checkpoint was saved with {named('ns_coefficients')} {name!r} and "
        f"{named('ns_steps')} {steps}, which computed {spelled(used)!r}; this run has "
        f"{now['ns_steps']} steps. These flags keep its bits: --muon-ns-coefficients "
        f"'{spelled(used)}' --muon-ns-steps {steps} --muon-ns-iteration "
        f"{then['ns_iteration']}. A checkpoint that is saved with them goes on with "
        f"{name}, too"
    )


def _resolved(numerics: Numerics) -> Group:
    """The settings that results depend on, with what the device chooses in place of
    None.
    """
    config = numerics.config
    settings = {
        **dataclasses.asdict(config),
        "ns_iteration": numerics.iteration,
        "ns_dtype": numerics.dtype,
        "split_matrices": numerics.split,
    }
    return {name: value for name, value in settings.items() if name not in _OTHERS}


def loaded_groups(ours: Sequence[Group], saved: Sequence[Group]) -> list[Group]:
    """The values of this run's parameter groups after a load, without the parameters.

    A group takes the values of the most similar saved group, but keeps the keys that
    tell this run's groups apart. So a run that decays every parameter still does after
    loading a checkpoint of a run that did not. Megatron itself also requires an equal
    wd_mult, and takes the last of several similar groups.
    """
    # core 0.14 sets None where there are several optimizers and none has taken a step
    steps = [group["step"] for group in saved if group.get("step") is not None]
    groups = []
    for group in ours:
        # the factor lr_mult, the last key, may have changed
        similar = _agreeing(group, saved, _REQUIRED)
        similar = similar or _agreeing(group, saved, _REQUIRED[:-1])
        if not similar:
            wanted = {key: _value(group, key) for key in _REQUIRED}
            raise ValueError(f"the checkpoint has no parameter group with {wanted}")
        alike = _before_factor(group, ours)
        best = max(
            similar, key=lambda other: [_same(alike, other, key) for key in _PREFERRED]
        )
        kept = [key for key in _identifiers() if key not in SCHEDULE]
        kept.append("default_config")  # whether Megatron logs its rate
        # another optimizer's groups may lack keys that ours have
        values = {**group, **best, **_of_keys(group, kept)}
        for mark, changed in _CHANGED.items():
            if not _same(group, best, mark):  # this run's own
                for key in (mark, *changed):
                    values.pop(key, None)
                values |= _of_keys(group, (mark, *changed))
        if not _same(group, best, LR_MULTIPLIER):
            values |= _multiplied(group, best)
        # fused Adams do not count steps of a group without parameters on this rank
        if steps:
            values["step"] = max(steps)
        values.pop("params", None)
        groups.append(values)
    return groups


def _before_factor(group: Group, ours: Sequence[Group]) -> Group:
    """The group with Megatron's ``default_config``, which a factor has put out: whether
    its rate was the run's, and not the decoupled one.
    """
    usual = [other.get("max_lr") for other in ours if other.get("default_config")]
    if LR_MULTIPLIER not in group or not any(usual):
        return group
    is_usual = math.isclose(group["max_lr"], group[LR_MULTIPLIER] * usual[0])
    return {**group, "default_config": is_usual}


def _multiplied(group: Group, saved: Group) -> Group:
    """A checkpoint's rates with the factor of a group of this run. Before core 0.16 it
    is ``lr_mult``, and not in them.
    """
    factor = 1.0
    if "default_config" in group:
        factor = group.get(LR_MULTIPLIER, 1.0) / saved.get(LR_MULTIPLIER, 1.0)
    rates = _of_keys(saved, ("max_lr", "min_lr"))
    return {key: factor * rate for key, rate in rates.items() if rate is not None}


def as_megatron_pairs(ours: Sequence[Group], loaded: Sequence[Group]) -> list[Group]:
    """``loaded_groups`` with our identifiers, so that Megatron pairs them with our
    groups.
    """
    pairs = zip(ours, loaded, strict=True)
    return [{**values, **_of_keys(group, _identifiers())} for group, values in pairs]


def _identifiers() -> tuple[str, ...]:
    """Keys by which Megatron pairs groups; up to 0.12 it pairs them by number."""
    keys = getattr(distrib_optimizer, "param_group_identifier_keys", ())
    return (*keys, "wd_mult", "pre_wd_mult")


def _of_keys(group: Group, keys: Sequence[str]) -> Group:
    return {key: group[key] for key in keys if key in group}


def _agreeing(group: Group, saved: Sequence[Group], keys: Sequence[str]) -> list[Group]:
    """The saved groups that have a group's values under all of these keys."""
    return [other for other in saved if all(_same(group, other, key) for key in keys)]


def _same(one: Group, two: Group, key: str) -> bool:
    return bool(_value(one, key) == _value(two, key))


def _value(group: Group, key: str) -> Any:
    """A group's value; NeMo writes some keys with a prefix."""
    return group.get(key, group.get(f"pre_{key}"))
