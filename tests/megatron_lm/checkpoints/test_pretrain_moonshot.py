"""From the proof of concept's own checkpoints to the plugin, both by their ``pretrain_gpt.py``.

Needs two checkouts: of toothacher17/Megatron-LM at 8aee20bd (NVIDIA/Megatron-LM#1428) at
PROOF_OF_CONCEPT_PATH, and a Megatron-LM at MEGATRON_LM_PATH.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from support.megatron_lm.scripts import (
    HERE,
    MOCK,
    MODEL,
    MUON,
    RUN,
    done,
    needs_checkout,
    pretrain,
    steps,
    words,
)

THEIRS = Path(os.environ.get("PROOF_OF_CONCEPT_PATH", "/PROOF_OF_CONCEPT_PATH-is-not-set"))
SAVE = "--bf16 --lr-decay-style constant --ckpt-format torch --train-iters 7"
pytestmark = [
    needs_checkout,
    pytest.mark.skipif(
        "PROOF_OF_CONCEPT_PATH" not in os.environ,
        reason="PROOF_OF_CONCEPT_PATH names no checkout of the proof of concept",
    ),
    pytest.mark.timeout(900),
]


def _proof_of_concept(processes: int, *options: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(HERE / "runs_proof_of_concept.py")]
    command += [str(THEIRS), str(THEIRS / "pretrain_gpt.py")]
    return done([*command, *words(MODEL, MOCK, RUN, MUON, *options)])


def _loss_and_norm(line: str) -> tuple[float, float]:
    match = re.search(r"lm loss: (\S+) .* grad norm: (\S+) ", line)
    assert match is not None, line
    return float(match[1]), float(match[2])


def _by_step(text: str) -> dict[int, tuple[float, float]]:
    return {number: _loss_and_norm(line) for number, line in steps(text).items()}


# How far from the proof of concept's own next steps, as a part of what it is without its momentum.
# Without TP its Newton-Schulz only rounds elsewhere. With TP it orthogonalizes each rank's piece by
# itself (its distrib_optimizer.py:354 asks for the opposite), where here the whole matrix is.
@pytest.mark.parametrize(
    ("processes", "parallel", "part"),
    [(2, "", 0.1), (4, "--tensor-model-parallel-size 2 --sequence-parallel", 0.5)],
)
def test_training_goes_on_as_the_proof_of_concept_would(
    processes: int, parallel: str, part: float, tmp_path: Path
) -> None:
    text = _proof_of_concept(processes, SAVE, parallel, f"--save {tmp_path} --save-interval 4")
    theirs = _by_step(text)
    # Newton-Schulz acts on query, key and value together there
    load = f"{MUON} {SAVE} {parallel} --muon-no-split-qkv --load {tmp_path} --ckpt-step 4"
    load += " --muon-dp-layout bucketed"  # its state lies in Megatron's order
    text = pretrain(processes, load)
    assert "is of the proof of concept of this work: its momentum goes on" in text
    ours, anew = _by_step(text), _by_step(pretrain(processes, load, "--no-load-optim"))
    assert list(ours) == [5, 6, 7]
    assert ours[5] == anew[5] == theirs[5]  # to the last digit: of the loaded weights, no step yet
    loss = theirs[7][0]  # the log has the mean of the first two iterations after a start as 6
    apart, without = abs(ours[7][0] - loss), abs(anew[7][0] - loss)
    assert apart < part * without, (ours, anew, theirs)
