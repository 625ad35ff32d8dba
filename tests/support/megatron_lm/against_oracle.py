"""Steps of Megatron-LM's own scripts, written down, beside the float64 oracle's.

The weights at the start, the gradients and the rates of each step are what Megatron
had; the oracle takes the same steps. The tolerance is found as
``expected/oracle_cases.py`` says: by an oracle in which every rounding is the worst
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.expected.oracle import Oracle
from support.expected.shaking import TRIALS, all_shaken, sizes
from support.megatron_lm.scripts import HERE, MODEL, MUON, PATHS, pretrain

STEPS = 3
CLIP = 1.0
DECAY = 0.1


def recorded(
    file: Path,
    *options: str,
    script: str = "pretrain_gpt.py",
    model: str = MODEL,
    **more: str,
) -> dict[str, Any]:
    """A run in fp32 on one process, so that the model's parameters are the main
    ones.
    """
    pretrain(
        1,
        MUON,
        f"--train-iters {STEPS}",
        *options,
        script=HERE / "recorded_pretrain.py",
        model=model,
        **{**PATHS, **more, "RECORD": str(file), "SCRIPT": script},
    )
    run: dict[str, Any] = torch.load(file)
    assert len(run["steps"]) == STEPS
    # one schedule, and what the oracle takes for its weight decay
    for step in run["steps"]:
        assert len({group["lr"] for group in step["groups"]}) == 1
        assert {group["weight_decay"] for group in step["groups"]} == {0.0, DECAY}
    return run


def oracle_of(run: dict[str, Any], **changes: Any) -> Oracle:
    """With Megatron's default betas and eps, and the heads of ``scripts.MODEL``."""
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


def outside(
    run: dict[str, Any], ns_dtype: str, target: dict[str, Tensor], **changes: Any
) -> set[str]:
    """Names of the weights that are further from the target than rounding explains.

    Over all elements roundings average out; the largest one of few trials may be
    exceeded. A scalar is its largest.

    ``changes`` say how the run's own oracle differs from ``oracle_of``.
    """
    exact = stepped(run, oracle_of(run, **changes))
    shaken = (
        oracle_of(run, **all_shaken(ns_dtype, seed), **changes)
        for seed in range(TRIALS)
    )
    trials = [stepped(run, oracle) for oracle in shaken]
    wrong = set()
    for name, want in exact.items():
        norms, largest = zip(
            *(sizes(trial[name] - want) for trial in trials), strict=True
        )
        norm, most = sizes(run["final"][name].double() - target[name])
        is_as_near = norm <= max(norms) or want.numel() == 1
        if not (is_as_near and most <= 2 * max(largest)):
            wrong.add(name)
    return wrong
