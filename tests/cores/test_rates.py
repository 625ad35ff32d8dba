"""Rates and weight decays after a load are those of the schedule that was asked for.

Without training: states of the optimizer and of Megatron's scheduler are loaded as
Megatron-LM does, and the groups are compared with those of a scheduler that is built
anew.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatron_muon import MuonConfig
from megatron_muon.mcore.checkpoint.interop.switch import reading_adamw
from megatron_muon.megatron_lm.rates import of_this_run
from support.installed import VERSION, installed
from support.models.gpt import Case, build, optimizer_config
from support.ranks import run
from support.runs.topologies import ONE

Group = dict[str, Any]
Option = Literal["none", "override", "use-checkpoint"]
MULTIPLIERS = (("*.linear_fc1.weight", 0.5), ("embedding.*", 3.0))
BY_PATTERN = (
    "*.linear_fc1.weight:lr=0.003,min_lr=0.0005",
    "embedding.*:lr=0.002,weight_decay=0.01",
    "*.linear_proj.weight:weight_decay=0",
)
ITERATIONS = {"warm-up unfinished": 3, "warm-up finished": 12}


@dataclass(frozen=True)
class Flags:
    """The flags of a run that its rates depend on."""

    style: str
    start_wd: float
    decoupled: float | None
    multipliers: tuple[tuple[str, float], ...]
    by_pattern: tuple[str, ...]
    lr: float = 1e-2
    min_lr: float = 1e-3
    warmup: int = 5
    decay: int = 20
    end_wd: float = 0.1

    def optimizer(self, name: str) -> Any:
        """Megatron's optimizer over a model of its own."""
        from megatron.core import optimizer as core

        built = build(Case(layers=1, optimizer=name), ONE)
        config = optimizer_config(built)
        config.lr, config.min_lr = self.lr, self.min_lr
        if self.decoupled is not None:
            config.decoupled_lr = self.decoupled
            config.decoupled_min_lr = self.decoupled / 10
        more = {}
        if VERSION >= (0, 16):
            more = {"config_overrides": core.get_standard_config_overrides(config)}
        settings = MuonConfig(lr_mults=self.multipliers, by_pattern=self.by_pattern)
        with installed(settings) if name == "muon" else nullcontext():
            return core.get_megatron_optimizer(config, built.chunks, **more)

    def scheduler(self, optimizer: Any, option: Option = "none") -> Any:
        """Megatron's scheduler as its training makes it."""
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=self.lr,
            min_lr=self.min_lr,
            lr_warmup_steps=self.warmup,
            lr_decay_steps=self.decay,
            lr_decay_style=self.style,
            start_wd=self.start_wd,
            end_wd=self.end_wd,
            wd_incr_steps=self.decay,
            wd_incr_style="constant" if self.start_wd == self.end_wd else "linear",
            use_checkpoint_opt_param_scheduler=option == "use-checkpoint",
            override_opt_param_scheduler=option == "override",
            wsd_decay_steps=10,
            lr_wsd_decay_style="linear",
        )


def _flags(style: str, grows: bool, decoupled: bool, own: str) -> Flags:
    return Flags(
        style=style,
        start_wd=0.01 if grows else 0.1,
        decoupled=1e-3 if decoupled else None,
        multipliers=MULTIPLIERS if own == "multipliers" else (),
        by_pattern=BY_PATTERN if own == "by pattern" else (),
    )


def _others(old: Flags) -> Flags:
    """Flags of which each is another, but for the parameters that have rates of their
    own.
    """
    return replace(
        old,
        lr=1e-4,
        min_lr=1e-5,
        warmup=8,
        decay=30,
        start_wd=2 * old.start_wd,
        end_wd=2 * old.end_wd,
        decoupled=old.decoupled and 5e-4,
    )


def _values(groups: list[Group]) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in groups]


def _fresh(
    flags: Flags, groups: list[Group], iteration: int
) -> list[tuple[float, float]]:
    """Rates and decays of these groups by a scheduler that is built anew."""
    copies = [
        {key: value for key, value in group.items() if key != "params"}
        for group in groups
    ]
    flags.scheduler(SimpleNamespace(param_groups=copies)).step(iteration)
    return _values(copies)


def _write_flags_over_groups(optimizer: Any, scheduler: Any, flags: Flags) -> None:
    """What Megatron's load does with the override flag since its pull request 3720."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = flags.lr, flags.min_lr
    scheduler.step(increment=0)


def _wrong(
    writer: str, option: Option, grows: bool, decoupled: bool, own: str
) -> list[Any]:
    """Each combination that ends with other rates than a scheduler that is built
    anew.
    """
    wrong = []
    combinations = itertools.product(
        ("constant", "cosine", "WSD"), ITERATIONS.items(), (False, True)
    )
    saver = _flags("constant", grows, decoupled, own).optimizer(writer)
    saver_groups = [dict(group) for group in saver.param_groups]
    loads = "multipliers" if own == "added" else own
    first = _flags("constant", grows, decoupled, loads)
    same = first.optimizer("muon")
    loader = (_others(first) if option != "none" else first).optimizer("muon")
    loader_groups = [dict(group) for group in loader.param_groups]
    for style, (phase, iteration), overwrites in combinations:
        old = _flags(style, grows, decoupled, own)
        new = old if option == "none" else _others(old)
        new = replace(new, multipliers=first.multipliers)
        _reset(saver, saver_groups)
        _reset(loader, loader_groups)
        schedule = old.scheduler(saver)
        schedule.step(iteration)
        state = copy.deepcopy(saver.state_dict())
        scheduler = new.scheduler(loader, option)
        with of_this_run(loader, scheduler, override=option == "override"):
            with (
                reading_adamw(loader, "momentum") if writer == "adam" else nullcontext()
            ):
                loader.load_state_dict(state)
            scheduler.load_state_dict(schedule.state_dict())
            if overwrites and option == "override":
                _write_flags_over_groups(loader, scheduler, new)
        if option == "use-checkpoint":
            wanted = _fresh(old, same.param_groups, iteration)
        else:
            wanted = _fresh(new, loader_groups, iteration)
        got = _values(loader.param_groups)
        logged = [group.get("default_config") for group in loader.param_groups]
        if got != wanted or logged != [g.get("default_config") for g in loader_groups]:
            wrong.append((style, phase, overwrites, got, wanted))
    return wrong


def _reset(optimizer: Any, groups: list[Group]) -> None:
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.clear()
        group.update(values)


@pytest.mark.parametrize("option", ["none", "override", "use-checkpoint"])
@pytest.mark.parametrize(
    "grows", [False, True], ids=["constant-decay", "growing-decay"]
)
@pytest.mark.parametrize("decoupled", [False, True], ids=["one-rate", "decoupled"])
@pytest.mark.parametrize(
    "writer, own",
    [
        ("muon", ""),
        ("muon", "multipliers"),
        ("muon", "added"),
        ("muon", "by pattern"),
        ("adam", ""),
        ("adam", "added"),
    ],
)
def test_rates_after_a_load_are_those_of_a_scheduler_that_is_built_anew(
    writer: str, own: str, decoupled: bool, grows: bool, option: Option
) -> None:
    (wrong,) = run(_wrong, 1, writer, option, grows, decoupled, own)
    assert wrong == []
