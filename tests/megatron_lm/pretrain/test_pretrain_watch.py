"""Logging steps in the real ``pretrain_gpt.py``: needs a Megatron-LM checkout and
tensorboard.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/pretrain/test_pretrain_watch.py
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from support import PYTHON311, ROOT
from support.megatron_lm.scripts import (
    CHECKOUT,
    HERE,
    MUON,
    argument,
    losses,
    needs_checkout,
    pretrain,
    steps,
)
from support.runs.watching import records

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is an extra"
)
pytestmark = [needs_checkout, needs_tensorboard, pytest.mark.timeout(900)]
TP_PP = f"{MUON} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16"


def _scalars(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's own reading of its event files: value by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read: Any = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: {event.step: event.value for event in read.Scalars(tag)}
        for tag in read.Tags()["scalars"]
    }


def test_a_run_is_the_same_and_tensorboard_has_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    watched = f"--muon-log-interval 2 --tensorboard-dir {folder}"
    logged = pretrain(4, TP_PP, watched)
    assert steps(logged) == steps(pretrain(4, TP_PP)) and len(steps(logged)) == 6
    assert argument(logged, "muon_log_file") == str(folder / "muon_watch.jsonl")
    start, *lines = records(folder / "muon_watch.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6] and start["ranks"] == 4
    scalars = _scalars(folder)
    named = {name for name in scalars if name.startswith("muon_")}
    for line in lines:
        for kind in ("muon", "adamw", "layers"):
            assert line[kind]
            for row, numbers in line[kind].items():
                for name, value in numbers.items():
                    tag = f"muon_{name}/{row}"
                    assert scalars[tag][line["step"]] == pytest.approx(
                        value, rel=1e-5
                    ), tag
                    named.discard(tag)
    assert not named
    assert len(lines[0]["layers"]) == 6  # on both stages, the final norm and the logits


def test_a_run_that_resumes_counts_iterations_as_megatron_does(tmp_path: Path) -> None:
    """Of a logging step that comes first, the layers' outputs are there, too."""
    save = (
        f"{MUON} --save {tmp_path} --save-interval 3 --muon-log-interval 2 "
        "--ckpt-format torch"
    )
    pretrain(1, save, "--exit-interval 3")
    pretrain(1, save, f"--load {tmp_path}")
    steps_ = [
        line
        for line in records(tmp_path / "muon_watch.jsonl")
        if line["kind"] == "step"
    ]
    assert [line["step"] for line in steps_] == [2, 4, 6]
    assert all(len(line["layers"]) == 6 for line in steps_)


def test_a_log_without_a_place_is_refused() -> None:
    text = pretrain(1, MUON, "--muon-log-interval 2", fails=True)
    assert "give --muon-log-file, --tensorboard-dir or --save" in text


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
