"""Three steps of the real ``pretrain_gpt.py`` equal the float64 oracle's; needs a checkout.

The weights at the start, the gradients and the rates of each step are what Megatron had; the
oracle takes the same steps. The tolerance is found as ``expected/oracle_cases.py`` says: by an
oracle in which every rounding is the worst one.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.expected.oracle import Oracle, newton_schulz
from support.expected.shaking import TRIALS, UNIT, shaken, shaken_product, sizes
from support.megatron_lm.scripts import HERE, MUON, PATHS, needs_checkout, pretrain

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
Tensor = torch.Tensor
STEPS = 3
CLIP = 1.0
DECAY = 0.1


@cache
def recorded(folder: Path, ns_dtype: str) -> dict[str, Any]:
    """A run in fp32 on one process, so that the model's parameters are the main ones."""
    file = folder / f"{ns_dtype}.pt"
    pretrain(
        1,
        MUON,
        f"--train-iters {STEPS} --muon-ns-dtype {ns_dtype}",
        script=HERE / "recorded_pretrain.py",
        RECORD=str(file),
        **PATHS,
    )
    step: dict[str, Any] = torch.load(file)
    return step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


def oracle_of(run: dict[str, Any], **changes: Any) -> Oracle:
    """With Megatron's default betas and eps, and the heads of ``megatron_lm.MODEL``."""
    oracle = Oracle(
        weights={name: w.double() for name, w in run["weights"].items()},
        heads=4,
        groups=2,
        head_size=16,
        lr=lambda name: run["steps"][len(oracle.norms) - 1]["groups"][0]["lr"],
        weight_decay=lambda name, w: DECAY if w.ndim > 1 else 0.0,
        betas=(0.9, 0.999),
        clip=CLIP,
    )
    for name, value in changes.items():
        setattr(oracle, name, value)
    return oracle


def stepped(run: dict[str, Any], oracle: Oracle) -> dict[str, Tensor]:
    for step in run["steps"]:
        oracle.step(step["grads"], step["norm"])
    return oracle.weights


def shaken_by(run: dict[str, Any], ns_dtype: str, seed: int) -> Oracle:
    generator = torch.Generator().manual_seed(seed)
    iteration = partial(
        newton_schulz,
        rounded=partial(shaken, UNIT[ns_dtype], generator),
        product=partial(shaken_product, generator),
    )
    rounded = partial(shaken, UNIT["fp32"], generator)
    return oracle_of(run, orthogonalize=iteration, rounded=rounded)


def outside(run: dict[str, Any], ns_dtype: str, target: dict[str, Tensor]) -> set[str]:
    """Names of the weights that are further from the target than rounding explains."""
    exact = stepped(run, oracle_of(run))
    trials = [stepped(run, shaken_by(run, ns_dtype, seed)) for seed in range(TRIALS)]
    wrong = set()
    for name, want in exact.items():
        norms, largest = zip(*(sizes(trial[name] - want) for trial in trials), strict=True)
        norm, most = sizes(run["final"][name].double() - target[name])
        if not (norm <= max(norms) and most <= 2 * max(largest)):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_three_steps_equal_the_oracles(folder: Path, ns_dtype: str) -> None:
    run = recorded(folder, ns_dtype)
    assert len(run["steps"]) == STEPS
    for step in run["steps"]:  # one schedule, and what the oracle takes for its weight decay
        assert len({group["lr"] for group in step["groups"]}) == 1
        assert {group["weight_decay"] for group in step["groups"]} == {0.0, DECAY}
    assert outside(run, ns_dtype, stepped(run, oracle_of(run))) == set()


@pytest.mark.parametrize("change", [{"nesterov": False}, {"ns_steps": 4}, {"split_qkv": False}])
def test_another_muon_is_noticed(folder: Path, change: dict[str, Any]) -> None:
    run = recorded(folder, "bf16")
    wrong = outside(run, "bf16", stepped(run, oracle_of(run, **change)))
    assert any(name.endswith("linear_qkv.weight") for name in wrong)
    assert not any("embedding" in name or "norm" in name for name in wrong)
