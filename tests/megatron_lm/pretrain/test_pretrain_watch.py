"""Logging steps in the real ``pretrain_gpt.py``: needs a Megatron-LM checkout and
tensorboard.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/pretrain/test_pretrain_watch.py
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from support import PYTHON311, ROOT
from support.megatron_lm.scripts import (
    CHECKOUT,
    HERE,
    MUON,
    losses,
    needs_checkout,
    pretrain,
    scalars,
    steps,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
TP_PP = f"{MUON} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16"


def _rows(folder: Path, number: str) -> dict[str, dict[int, float]]:
    """Values by step of each row that has a number."""
    tag = f"muon_{number}/"
    return {
        name.removeprefix(tag): values
        for name, values in scalars(folder).items()
        if name.startswith(tag)
    }


def test_a_run_is_the_same_and_tensorboard_has_its_numbers(tmp_path: Path) -> None:
    """Without a writer the log has their ranges."""
    pytest.importorskip("tensorboard")
    interval = "--muon-log-interval 2"
    logged = pretrain(4, TP_PP, f"{interval} --tensorboard-dir {tmp_path}")
    silent = pretrain(4, TP_PP, interval)
    assert steps(logged) == steps(silent) == steps(pretrain(4, TP_PP))
    assert len(steps(logged)) == 6
    updates = _rows(tmp_path, "update_rms")
    assert len(updates) > 4 and all(
        list(each) == [2, 4, 6] for each in updates.values()
    )
    assert _rows(tmp_path, "gradient_rms")
    # on both stages, the final norm and the logits
    assert len(_rows(tmp_path, "output_rms")) == 6
    for step in (2, 4, 6):
        values = [each[step] for each in updates.values()]
        line = f"step {step}: update_rms {min(values):.3g} to {max(values):.3g}, "
        assert f"[megatron_muon] {line}" in logged and line in silent


def test_a_run_that_resumes_counts_iterations_as_megatron_does(tmp_path: Path) -> None:
    """Of a logging step that comes first, the layers' outputs are there, too."""
    pytest.importorskip("tensorboard")
    save = (
        f"{MUON} --save {tmp_path} --save-interval 3 --muon-log-interval 2 "
        f"--ckpt-format torch --tensorboard-dir {tmp_path / 'events'}"
    )
    pretrain(1, save, "--exit-interval 3")
    pretrain(1, save, f"--load {tmp_path}")
    outputs = _rows(tmp_path / "events", "output_rms")
    assert len(outputs) == 6
    assert all(list(values) == [2, 4, 6] for values in outputs.values())


def test_a_run_with_an_infinite_momentum_ends_after_lines_of_megatrons_log() -> None:
    """Of steps 2, 4 and 6. It trains on until then, with finite losses."""
    script = HERE / "infinite_momentum_pretrain.py"
    flags = "--log-interval 2 --train-iters 9 --muon-nonfinite-limit 3"
    text = pretrain(
        2,
        MUON,
        flags,
        script=script,
        fails=True,
        PYTHONPATH=f"{ROOT}:{PYTHON311}:{CHECKOUT}",
    )
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    said = [line for line in text.splitlines() if f"{name} was not updated in" in line]
    assert [line.split(":")[0] for line in said] == [
        f"[megatron_muon] step {at}" for at in (2, 4, 6)
    ]
    assert f"[megatron_muon] step 2: the momentum of {name} is not finite" in text
    # on both ranks
    assert text.count(f"FloatingPointError: {name}: the direction was not finite") == 2
    assert {2, 4} <= steps(text).keys() and 6 not in steps(text)
    assert all(map(math.isfinite, losses(text)))
