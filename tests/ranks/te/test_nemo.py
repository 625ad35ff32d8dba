"""NeMo 2's own optimizer module over the plugin steps as Megatron's factory does.

Where PYTHONPATH has a clone of NVIDIA-NeMo/NeMo that has ``nemo/lightning`` and the
packages that it imports.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest
import torch

import megatron_muon
from support.installed import installed
from support.models.gpt import Case, Topology, build, held, write_grads
from support.ranks import run
from support.runs.whole import differences, whole

CASE = Case(steps=4)
SETTINGS = CASE.settings


def _reason() -> str | None:
    if (
        importlib.util.find_spec("nemo") is None
        or importlib.util.find_spec("lightning") is None
    ):
        return "no NeMo on the path"
    from megatron.core.optimizer import get_megatron_optimizer

    if "lr_mult" not in inspect.signature(get_megatron_optimizer).parameters:
        return (
            "NeMo 2 gives get_megatron_optimizer lr_mult, which core 0.15 and "
            "earlier take"
        )
    return None


pytestmark = pytest.mark.skipif(_reason() is not None, reason=str(_reason()))


def _config() -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="muon",
        lr=CASE.lr,
        weight_decay=CASE.weight_decay,
        clip_grad=CASE.clip,
        bf16=True,
        params_dtype=CASE.dtype,
        use_distributed_optimizer=True,
    )


def _module(steps: int, **conditions: Any) -> Any:
    from nemo.lightning.pytorch.optim import (
        CosineAnnealingScheduler,
        MegatronOptimizerModule,
    )

    schedule = CosineAnnealingScheduler(
        max_steps=steps, warmup_steps=2, constant_steps=0, min_lr=0.002
    )
    return MegatronOptimizerModule(_config(), schedule, **conditions)


def _faster(name: str, param: torch.nn.Parameter) -> bool:
    return "linear_fc1" in name


class _Holder(torch.nn.Module):
    """A chunk as NeMo has it: a Lightning module around Megatron's DDP."""

    def __init__(self, ddp: torch.nn.Module) -> None:
        super().__init__()
        self.module = ddp


class _Trainer:
    """Of Lightning's, what an optimizer module asks for."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []


def _through_nemo(built: Any) -> tuple[Any, Any]:
    from nemo.lightning.megatron_parallel import MegatronParallel

    model = MegatronParallel(
        [_Holder(chunk) for chunk in built.chunks],
        ddp_config=built.ddp.ddp_config,
        cpu=True,
    )
    model.trainer = _Trainer()
    module = _module(CASE.steps + 2, scale_lr_cond=_faster, lr_mult=3.0)
    configured = module(None, megatron_parallel=model)
    assert configured["optimizer"].mcore_optimizer is not None
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]


def _through_core(built: Any) -> Any:
    from megatron.core.optimizer import get_megatron_optimizer

    return get_megatron_optimizer(
        _config(), built.chunks, scale_lr_cond=_faster, lr_mult=3.0
    )


def _stepped(topology: Topology, rates: list[Any] | None) -> dict[str, Any]:
    """Through NeMo, whose rates are written down; or through Megatron's factory, given
    these.
    """
    built = build(CASE, topology)
    with installed(SETTINGS):
        if rates is None:
            theirs, schedule = _through_nemo(built)
            built.optimizer = theirs.mcore_optimizer
        else:
            theirs = built.optimizer = _through_core(built)
    for step in range(CASE.steps):
        groups = built.param_groups
        if rates is not None:
            for group, (lr, decay) in zip(groups, rates[step], strict=True):
                group["lr"], group["weight_decay"] = lr, decay
        now = [(group["lr"], group["weight_decay"]) for group in groups]
        built.log.setdefault("rates", []).append(now)
        write_grads(built, step)
        _, norm, _ = theirs.step()  # NeMo's has a loss where Megatron's has success
        built.log.setdefault("norms", []).append(float(norm))
        theirs.zero_grad()
        if rates is None:
            schedule.step()
    built.log["meter"] = megatron_muon.meter(built.optimizer)
    return held(built)


@pytest.mark.parametrize("world_size", [1, 2])
def test_its_optimizer_module_steps_as_megatrons_factory_does(world_size: int) -> None:
    topology = Topology(dp=world_size)
    theirs = run(_stepped, world_size, topology, None, timeout=400)
    rates = theirs[0]["log"]["rates"]
    ours = run(_stepped, world_size, topology, rates)
    assert differences(whole(ours), whole(theirs)) == []
    assert [one["log"] for one in ours] == [one["log"] for one in theirs]
    assert theirs[0]["log"]["meter"].steps == CASE.steps
    lrs, decays = zip(*(rate for step in rates for rate in step), strict=True)
    assert len(set(lrs)) == 2 * CASE.steps  # the schedule moves both rates
    assert set(decays) == {0.0, CASE.weight_decay}
