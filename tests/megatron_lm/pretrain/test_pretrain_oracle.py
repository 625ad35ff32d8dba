"""Three steps of the real ``pretrain_gpt.py`` equal the float64 oracle's; needs a
checkout.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.megatron_lm.against_oracle import oracle_of, outside, recorded, stepped
from support.megatron_lm.scripts import (
    MUON,
    alone,
    needs_checkout,
    pretrain,
    scalars,
    steps,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]


@cache
def run_of(folder: Path, ns_dtype: str) -> dict[str, Any]:
    return recorded(folder / f"{ns_dtype}.pt", f"--muon-ns-dtype {ns_dtype}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_three_steps_equal_the_oracles(folder: Path, ns_dtype: str) -> None:
    run = run_of(folder, ns_dtype)
    assert outside(run, ns_dtype, stepped(run, oracle_of(run))) == set()


@pytest.mark.parametrize(
    "change", [{"nesterov": False}, {"ns_steps": 4}, {"split_qkv": False}]
)
def test_another_muon_is_noticed(folder: Path, change: dict[str, Any]) -> None:
    run = run_of(folder, "bf16")
    wrong = outside(run, "bf16", stepped(run, oracle_of(run, **change)))
    assert any(name.endswith("linear_qkv.weight") for name in wrong)
    assert not any("embedding" in name or "norm" in name for name in wrong)


ADAM = "--optimizer adam --use-distributed-optimizer --muon-cpu"
THRESHOLD = 0.02  # the first step's logits are larger
OURS = f"--muon-qk-clip {THRESHOLD}"
THEIRS = f"--qk-clip --qk-clip-threshold {THRESHOLD}"
OPTIMIZERS = pytest.mark.parametrize("optimizer", [MUON, ADAM], ids=["muon", "adam"])


def _run(
    folder: Path, optimizer: str, *clip: str
) -> tuple[dict[int, str], list[float]]:
    """What Megatron prints of each step, and the largest logits in TensorBoard where
    they are.
    """
    pytest.importorskip("tensorboard")
    options = ("--bf16", "--disable-bias-linear", f"--tensorboard-dir {folder}")
    printed = steps(pretrain(2, optimizer, *options, *clip))
    return printed, [*scalars(folder).get("max_attention_logit", {}).values()]


@OPTIMIZERS
def test_the_plugins_flag_clips_from_the_first_step_on(
    optimizer: str, tmp_path: Path
) -> None:
    free, _ = _run(tmp_path / "free", optimizer)
    clipped, _ = _run(tmp_path / "clipped", optimizer, OURS)
    assert len(free) == len(clipped) == 6
    assert free[1] == clipped[1] and free[2] != clipped[2]  # it comes after the step


@OPTIMIZERS
def test_megatrons_flags_do_the_same_and_log_the_logits(
    optimizer: str, tmp_path: Path
) -> None:
    if "[--qk-clip]" not in alone("--help"):  # a help text names it, too
        pytest.skip("this Megatron has no --qk-clip")
    log = "--log-max-attention-logit"
    _, free = _run(tmp_path / "free", optimizer, log)
    ours = _run(tmp_path / "ours", optimizer, OURS, log)
    theirs = _run(tmp_path / "theirs", optimizer, THEIRS, log)
    assert ours == theirs
    assert len(free) == len(theirs[1]) == 6 and free[0] == theirs[1][0] > THRESHOLD
    assert max(theirs[1][1:]) < min(free[1:])
