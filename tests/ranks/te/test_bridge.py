"""Megatron-Bridge's own ``setup_optimizer`` makes the plugin's optimizer, and its scheduler steps.

``BRIDGE_PATH`` names the ``src`` of a clone. Real: ``megatron.bridge.training.optim`` and all that
it imports. Not imported: the package's ``__init__``, which registers its models. Not run: its
``pretrain``.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support import PYTHON311, te_on_cpu
from support.models import gpt
from support.models.gpt import Case, Topology, start, trained, truth
from support.ranks import run
from support.whole import differences

PATH = os.environ.get("BRIDGE_PATH", "")
pytestmark = pytest.mark.skipif(
    te_on_cpu.TE is None or not PATH,
    reason="BRIDGE_PATH names no clone, or TE no release",
)
CASE = Case(steps=4)


def _optim() -> Any:
    """Bridge's module, of a package without its ``__init__``."""
    for path in (PATH, str(PYTHON311)):
        if path not in sys.path:
            sys.path.append(path)
    importlib.import_module("typing_override")
    import megatron

    megatron.__path__.append(str(Path(PATH, "megatron")))
    package = types.ModuleType("megatron.bridge")
    package.__path__ = [str(Path(PATH, "megatron", "bridge"))]
    sys.modules.setdefault("megatron.bridge", package)
    return importlib.import_module("megatron.bridge.training.optim")


def _settings() -> Any:
    config = importlib.import_module("megatron.bridge.training.config")
    schedule = config.SchedulerConfig(lr_decay_style="linear", lr_decay_iters=10)
    schedule.lr_warmup_steps, schedule.lr_decay_steps, schedule.wd_incr_steps = 0, 10, 10
    schedule.start_weight_decay = schedule.end_weight_decay = CASE.weight_decay
    return schedule


@contextmanager
def _by_bridge(imported: str) -> Iterator[None]:
    """Within it Bridge makes the optimizer; it is imported before or after ``install()``."""
    if imported == "before":
        _optim()

    def make_optimizer(built: Any) -> Any:
        return _optim().setup_optimizer(gpt.optimizer_config(built), _settings(), built.chunks)[0]

    with mock.patch.object(gpt, "make_optimizer", make_optimizer):
        yield


@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize("topology", [Topology(), Topology(2, 1, 2, overlap=True)], ids=str)
def test_its_optimizer_steps_as_megatrons_factory_makes_it_step(
    topology: Topology, imported: str
) -> None:
    assert differences(truth(CASE), trained(CASE, topology, partial(_by_bridge, imported))) == []


def _scheduled() -> tuple[list[float], bool]:
    """The rates of Muon's group over three steps of Bridge's scheduler; whose optimizer it is."""
    import megatron_muon

    schedulers = []

    def make_optimizer(built: Any) -> Any:
        config = gpt.optimizer_config(built)
        optimizer, scheduler = _optim().setup_optimizer(config, _settings(), built.chunks)
        schedulers.append(scheduler)
        return optimizer

    with mock.patch.object(gpt, "make_optimizer", make_optimizer):
        built = start(CASE, Topology())
    rates = []
    for _ in range(3):
        rates.append(gpt.inner_optimizers(built.optimizer)[0].param_groups[0]["lr"])
        schedulers[0].step(increment=1)
    return rates, megatron_muon.meter(built.optimizer).steps == 0


def test_its_scheduler_sets_the_rates() -> None:
    ((rates, has_meter),) = run(_scheduled, 1)
    assert has_meter
    assert rates == pytest.approx([CASE.lr * (1 - 0.1 * step) for step in range(3)])
