"""A run of the real ``pretrain_gpt.py`` that is killed and goes on: needs a checkout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from megatron_lm import MUON, environment, needs_checkout, pretrain, pretrain_command

pytestmark = [needs_checkout, pytest.mark.timeout(1500)]
LAST = 12
RUN = f"{MUON} --bf16 --train-iters {LAST} --lr-decay-iters {LAST} --save-interval 3"
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-pp2-dp2": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
}


def steps(text: str) -> dict[int, str]:
    """What Megatron prints of each iteration: loss scale, loss and norms, to the last digit."""
    found = re.findall(r"iteration +(\d+)/.*?(lm loss: .*)", text)
    return {int(number): re.sub(r"\[.*?\]", "", rest) for number, rest in found}


def killed(processes: int, *options: str) -> str:
    """What a run prints until a rank gets SIGKILL, once iteration 5 is over."""
    run = subprocess.Popen(
        pretrain_command(processes, *options),
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    assert run.stdout is not None
    for line in run.stdout:
        lines.append(line)
        if re.search(r"iteration +5/", line):
            ranks = [
                p for p in psutil.Process(run.pid).children() if "megatron_muon" in p.cmdline()
            ]
            assert len(ranks) == processes, ranks
            os.kill(ranks[-1].pid, signal.SIGKILL)
    text = "".join(lines)
    assert run.wait() != 0, text[-3000:]
    return text


@pytest.mark.parametrize(
    ("layout", "format"),
    [("tp2", "torch"), ("tp2", "torch_dist"), ("tp2-pp2-dp2", "torch_dist")],
)
def test_a_killed_run_goes_on_bit_for_bit(layout: str, format: str, tmp_path: Path) -> None:
    processes, parallel = LAYOUTS[layout]
    whole = steps(pretrain(processes, RUN, parallel))
    where = f"--ckpt-format {format} --save {tmp_path} --load {tmp_path}"
    before = steps(killed(processes, RUN, parallel, where))
    last = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= last < LAST and 5 in before
    after = steps(pretrain(processes, RUN, parallel, where))
    assert list(after) == list(range(last + 1, LAST + 1))
    # Megatron's log has the mean of the first two iterations after a start as its second
    assert {n: after[n] for n in after if n != last + 2} == {
        n: whole[n] for n in after if n != last + 2
    }
    assert {n: before[n] for n in (1, 3, 4, 5)} == {n: whole[n] for n in (1, 3, 4, 5)}
