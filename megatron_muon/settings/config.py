"""The settings of Distributed Muon, one row each, checked when they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar

from megatron_muon.settings.coefficients import (
    SETS,
    Restarts,
    canonical,
    default_steps,
    require_bounded,
    require_whole,
    restarts_of,
)
from megatron_muon.settings.rows import rows_of
from megatron_muon.settings.run import HomePolicy as HomePolicy
from megatron_muon.settings.run import RunSettings
from megatron_muon.settings.run import SplitMatrices as SplitMatrices
from megatron_muon.settings.splits import SplitKind as SplitKind
from megatron_muon.settings.update import NsIteration as NsIteration
from megatron_muon.settings.update import UpdateSettings


@dataclass(frozen=True, kw_only=True)
class MuonConfig(RunSettings, UpdateSettings):
    """Settings of the Muon part of a run; the defaults are Moonlight's (arXiv
    2502.16982).

    docs/flags.md says what each is, as ``--help`` does. Here patterns are tuples,
    ``splits``, ``lr_mults`` and ``wd_mults`` are tuples of pairs, ``round_bytes`` is in
    bytes, and ``ns_coefficients`` may be a set's name, one triple for every step or a
    tuple of triples. Without ``ns_steps`` a set that is nothing with 5 steps,
    deepseekv4, has its own 10. A list becomes a tuple. None leaves a choice to the
    device or turns a feature off. lr and weight decay are not here: they come from
    Megatron's parameter groups, step by step.

    Raises:
        TypeError: a setting is of the wrong kind, or there is none of that name.
        ValueError: a setting is out of its range, not finite or not one of its choices,
            or the coefficients make directions that are not finite.
    """

    # The settings that were written out; those unlike their default where all were, by
    # ``replace``.
    given: ClassVar[frozenset[str]]

    def __new__(cls, **given: Any) -> MuonConfig:
        made = super().__new__(cls)
        defaults = {each.name: each.default for each in fields(cls)}
        for name in given.keys() - defaults:
            close = " or ".join(map(repr, get_close_matches(name, defaults, 2)))
            hint = f"; did you mean {close}?" if close else ""
            raise TypeError(f"MuonConfig has no setting {name!r}{hint}")
        if len(given) == len(defaults):
            given = {
                name: value
                for name, value in given.items()
                if value != defaults.get(name)
            }
        object.__setattr__(made, "given", frozenset(given))
        return made

    def __post_init__(self) -> None:
        for name, setting in ROWS.items():
            object.__setattr__(self, name, _in_tuples(getattr(self, name)))
            setting.require(getattr(self, name))
        object.__setattr__(self, "ns_coefficients", canonical(self.ns_coefficients))
        if "ns_steps" not in self.given:
            object.__setattr__(self, "ns_steps", default_steps(self.ns_coefficients))
        require_whole(self.ns_coefficients, self.ns_steps)
        for dtype in (self.ns_dtype,) if self.ns_dtype else ("bf16", "fp16"):
            require_bounded(self.ns_coefficients, self.ns_steps, dtype)
        if self.ns_iteration == "gram":
            _require_restarts(self)
        _require_log(self)
        _require_period(self)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of names in all settings. Each must match a parameter."""
        pairs = (*self.splits, *self.lr_mults, *self.wd_mults)
        return (
            *self.muon_include,
            *self.muon_exclude,
            *(pattern for pattern, _ in pairs),
        )

    def setting_of(self, pattern: str) -> str:
        """The setting that has one of ``patterns``, named with its flag."""
        for name in (
            "splits",
            "lr_mults",
            "wd_mults",
        ):  # splits first: they match Muon's alone
            if any(pattern == other for other, _ in getattr(self, name)):
                return named(name)
        return named("muon_include" if pattern in self.muon_include else "muon_exclude")


ROWS = rows_of(MuonConfig)


def _in_tuples(value: Any) -> Any:
    """A value in which lists, also those of Hydra, are tuples."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(map(_in_tuples, value))
    return value


def named(field: str) -> str:
    """A setting in a message: its field with its flag."""
    return ROWS[field].named


def _needed(lists: Restarts, config: MuonConfig) -> tuple[object, ...]:
    """The restarts that a run may need: a CPU without bf16 instructions has fp32
    squares.
    """
    if config.ns_dtype is None:  # as the device decides
        return lists.fp16, lists.bf16, lists.fp32_squares
    own = getattr(lists, config.ns_dtype)
    return own, own if config.ns_dtype == "fp32" else lists.fp32_squares


def _require_restarts(config: MuonConfig) -> None:
    name, steps = config.ns_coefficients, config.ns_steps
    lists = restarts_of(name, steps)
    if lists is not None and None not in _needed(lists, config):
        return
    known = []
    for other, coefficients in SETS.items():
        counts = [
            s
            for s, lists in coefficients.restarts.items()
            if None not in _needed(lists, config)
        ]
        known += [f"{other} with {', '.join(map(str, counts))}"] if counts else []
    raise ValueError(
        f"{named('ns_iteration')} 'gram': the Gram iteration has not been found "
        "accurate with "
        f"{named('ns_coefficients')} {name!r}, {named('ns_steps')} {steps}, "
        f"{named('ns_dtype')} "
        f"{config.ns_dtype or 'bf16 and fp16'!r}: take {named('ns_iteration')} 'auto' "
        "or "
        f"'standard', or what gram has been tested with: {'; '.join(known)} steps"
    )


def _require_log(config: MuonConfig) -> None:
    """Logging steps need a file, and whole matrices."""
    interval, file = config.log_interval, config.log_file
    if interval is not None and config.split_matrices not in (None, "off"):
        raise NotImplementedError(
            f"{named('split_matrices')} {config.split_matrices!r} with "
            f"{named('log_interval')}: "
            "the numbers of a matrix that several ranks share are not computed yet; "
            "leave one of "
            "them out"
        )
    if (interval is None) != (file is None):
        raise ValueError(
            f"{named('log_interval')} {interval!r} with {named('log_file')} {file!r}: "
            "give both, "
            "the steps between two lines and the file that takes them, or neither"
        )


def _require_period(config: MuonConfig) -> None:
    """What belongs to block steps has some, and what is of whole matrices has none."""
    if config.full_period == 1:
        if config.block_lr_mult != 1.0:
            raise ValueError(
                f"{named('block_lr_mult')} {config.block_lr_mult} is for the steps "
                "between full "
                f"ones, and {named('full_period')} is 1: give a period, or leave it out"
            )
    elif config.log_interval is not None:
        raise NotImplementedError(
            f"{named('full_period')} {config.full_period} with "
            f"{named('log_interval')}: the "
            "numbers of TP slices are not logged yet; leave one of them out"
        )
