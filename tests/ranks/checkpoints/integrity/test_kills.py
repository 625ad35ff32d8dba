"""A killed save harms no older iteration, and the one that it wrote over is never taken for whole.

What the tracker names afterwards loads, and is right; or it is refused, with the `--ckpt-step` of
the newest whole one, which loads and is right.

The short variants kill a few times. ``-m slow`` kills 200 times and prints where; it needs a
checkout at MEGATRON_LM_PATH, whose own save_checkpoint and load_checkpoint are called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from support import PYTHON311, ROOT, TESTS
from support.checkpoints.killed_ranks import DIGEST, METADATA, NAMING, SHARDS, Spec
from support.installed import VERSION
from support.megatron_lm.scripts import CHECKOUT, environment, needs_checkout

pytestmark = pytest.mark.timeout(7200)

EVERY = [
    Spec("training", "torch_dist", False, tp=1, dp=2, kills=44, seed=1),
    Spec("training", "torch_dist", True, tp=1, dp=2, kills=44, seed=2),
    Spec("training", "torch_dist", True, tp=2, dp=1, kills=24, seed=3),
    Spec("training", "torch_dist", True, tp=1, dp=3, kills=24, seed=4),
    Spec("training", "torch_dist", False, tp=2, dp=2, kills=24, seed=5),
    Spec("training", "torch", False, tp=2, dp=1, kills=20, seed=6),
    Spec("training", "torch", False, tp=2, dp=2, kills=20, seed=7),
]


def killed(spec: Spec) -> list[dict[str, Any]]:
    """What came of a series of saves, all but the last of them killed."""
    paths = [str(ROOT), str(TESTS), str(PYTHON311)]
    if spec.through == "training":
        paths.insert(0, str(CHECKOUT))
    else:  # of the core that this process has
        paths += [path for path in sys.path if path]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "support.checkpoints.killed_saves",
        json.dumps(asdict(spec)),
    ]
    result = subprocess.run(
        command,
        cwd=TESTS,
        env=environment(PYTHONPATH=os.pathsep.join(paths)),
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def check(spec: Spec) -> Counter[str]:
    """Nothing was lost, and as many were killed as were to be. Returns how many in each phase."""
    times = killed(spec)
    for one in times:
        assert not one["wrong"] and not one["errors"], one
    assert sum(one["killed"] for one in times) > spec.kills
    return Counter(one["phase"] for one in times[:-1] if one["killed"])


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_killed_save_is_whole_or_refused(background: bool) -> None:
    """Without Megatron-LM, so without a tracker."""
    if background and VERSION < (0, 14):
        pytest.skip("torch 2.13 has not what this megatron-core's asynchronous writer calls")
    check(Spec("core", "torch_dist", background, tp=1, dp=2, kills=2, seed=7))


@needs_checkout
@pytest.mark.parametrize(
    "spec",
    [
        Spec("training", "torch_dist", False, tp=1, dp=2, kills=5, seed=8),
        Spec("training", "torch", False, tp=2, dp=1, kills=4, seed=9),
    ],
    ids=["torch_dist", "torch"],
)
def test_a_killed_save_harms_no_older_one(spec: Spec) -> None:
    check(spec)


PHASES_SEEN: Counter[str] = Counter()


@pytest.mark.slow
@needs_checkout
@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"seed{spec.seed}")
def test_two_hundred_kills_harm_no_older_one(spec: Spec) -> None:
    phases = check(spec)
    PHASES_SEEN.update(phases)
    print(f"\n{spec}: nothing harmed; {', '.join(f'{n} {phase}' for phase, n in phases.items())}")
    if spec == EVERY[-1] and sum(PHASES_SEEN.values()) >= 200:  # not where a few were chosen
        assert min(PHASES_SEEN[p] for p in (SHARDS, METADATA, DIGEST, NAMING)) >= 20


def test_they_are_two_hundred() -> None:
    assert sum(spec.kills for spec in EVERY) == 200
