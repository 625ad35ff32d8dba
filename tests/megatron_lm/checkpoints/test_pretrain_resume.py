"""A run of the real ``pretrain_gpt.py`` that is killed and goes on: needs a
checkout.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from support.megatron_lm.scripts import (
    EXPERTS,
    HERE,
    MUON,
    PATHS,
    environment,
    needs_checkout,
    needs_torch_dist,
    pretrain,
    pretrain_command,
    steps,
    version,
)

pytestmark = [needs_checkout, pytest.mark.timeout(1500)]
LAST = 12
RUN = f"{MUON} --bf16 --train-iters {LAST} --lr-decay-iters {LAST} --save-interval 3"
LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-pp2-dp2": (
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --overlap-grad-reduce --overlap-param-gather",
    ),
}


def signalled(
    folder: Path, number: signal.Signals, processes: int, *options: str
) -> str:
    """What a run prints whose last rank gets a signal, once iteration 5 is over."""
    # a file, since what torch_dist starts in a killed rank outlives it and would hold a
    # pipe open
    log = folder / "log"
    with log.open("w") as stdout:
        run = subprocess.Popen(
            pretrain_command(processes, *options),
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=stdout,
            stderr=subprocess.STDOUT,
        )
    try:
        while not re.search(r"iteration +5/", log.read_text()):
            assert run.poll() is None, log.read_text()[-3000:]
            time.sleep(0.05)
        children = psutil.Process(run.pid).children()
        ranks = [child for child in children if "megatron_muon" in child.cmdline()]
        assert len(ranks) == processes, ranks
        left_behind = ranks[-1].children(recursive=True)
        ranks[-1].send_signal(number)
        assert (run.wait(timeout=120) == 0) is (number == signal.SIGTERM), (
            log.read_text()[-3000:]
        )
        for child in left_behind:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    finally:
        run.kill()
    return log.read_text()


@pytest.mark.parametrize(
    ("number", "layout", "format"),
    [
        (signal.SIGKILL, "tp2", "torch"),
        (signal.SIGKILL, "tp2", "torch_dist"),
        pytest.param(
            signal.SIGKILL, "tp2-pp2-dp2", "torch_dist", marks=pytest.mark.slow
        ),
        (signal.SIGTERM, "tp2", "torch"),
        (signal.SIGTERM, "tp2", "torch_dist"),
    ],
)
def test_a_run_that_a_signal_ends_resumes_bit_for_bit(
    number: signal.Signals, layout: str, format: str, tmp_path: Path
) -> None:
    """A killed one from its last save. With --exit-signal-handler SIGTERM on one rank,
    as before a preemption, ends the run after its step, with a save.
    """
    needs_torch_dist(format)
    processes, parallel = LAYOUTS[layout]
    whole = steps(pretrain(processes, RUN, parallel))
    saved = tmp_path / "saved"
    where = f"--ckpt-format {format} --save {saved} --load {saved}"
    if number == signal.SIGTERM:
        where += " --exit-signal-handler --save-interval 100"
    text = signalled(tmp_path, number, processes, RUN, parallel, where)
    before = steps(text)
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= last < LAST and 5 in before
    if number == signal.SIGTERM:
        assert "exiting program after receiving SIGTERM" in text
        assert max(before) == last >= 5
    after = steps(pretrain(processes, RUN, parallel, where))
    assert list(after) == list(range(last + 1, LAST + 1))
    # Megatron's second line after a start has the mean of two iterations
    assert all(after[n] == whole[n] for n in after if n != last + 2)
    assert all(before[n] == whole[n] for n in (1, 3, 4, 5))


@pytest.mark.parametrize(
    ("option", "rate"),
    [
        ("--override-opt_param-scheduler", 2e-2),
        ("--use-checkpoint-opt_param-scheduler", 1e-2),
    ],
)
def test_the_schedule_after_a_load_is_the_one_that_was_asked_for(
    option: str, rate: float, tmp_path: Path
) -> None:
    where = f"--save {tmp_path} --save-interval 2 --ckpt-format torch"
    run = f"{MUON} --bf16 --lr-decay-style constant {where}"
    pretrain(1, run, "--train-iters 2")
    text = pretrain(1, run, f"--train-iters 4 --lr 2e-2 --load {tmp_path} {option}")
    rates = re.findall(r"learning rate: (\S+)", text)
    assert [float(each) for each in rates] == [rate, rate], text[-3000:]


OVERRIDE = "--override-opt_param-scheduler --lr 1e-4 --min-lr 1e-5"
# Linear from 1e-4 to 1e-5 over six steps, two of them done; the embeddings' rate is
# decoupled.
FIRST = {("7e-05", "0.1"), ("7e-05", "0"), ("0.0007", "0.1")}
HALVED = {pair if pair[0] != "0.0007" else ("0.00035", "0.1") for pair in FIRST}
HALVED |= {("0.00014", "0.03")}  # by pattern, between a rate and a minimum of its own


def first_rates(text: str) -> set[tuple[str, str]]:
    """Rates and weight decays of the first step, as ``rates_pretrain.py`` prints
    them.
    """
    (line,) = re.findall(r"^first step: (.*)$", text, re.MULTILINE)
    return set(re.findall(r"(\S+) and ([^; ]+)", line))


@pytest.mark.parametrize("saved_by", ["muon", "adamw"])
def test_the_first_step_after_a_load_has_the_rates_of_the_override(
    saved_by: str, tmp_path: Path
) -> None:
    """Into Muon, and with --adamw-from-muon; a line of Muon's load says them. AdamW's
    own load is Megatron's, which has others, or finds none: a line says which.
    """
    adam = "--optimizer adam --use-distributed-optimizer"
    halves = "--muon-lr-mult embedding.*=0.5 --muon-for "
    halves += "*.linear_fc1.weight:lr=2e-4,min_lr=2e-5,weight_decay=0.03,ns_steps=6"
    muon = f"{MUON} {halves} --muon-from-adamw momentum"
    run = "--bf16 --ckpt-format torch --decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
    where = f"--save {tmp_path} --save-interval 2"
    pretrain(1, run, muon if saved_by == "muon" else adam, "--train-iters 2", where)
    run = f"{run} --load {tmp_path} --train-iters 3 {OVERRIDE}"
    script = HERE / "rates_pretrain.py"
    text = pretrain(1, run, muon, script=script, **PATHS)
    assert first_rates(text) == HALVED, text[-3000:]
    lines = re.findall(
        r"iter_0000002: files checked, momentum of 24 matrices; .*: (.*)", text
    )
    if saved_by == "muon":
        (line,) = lines
        assert set(re.findall(r"(\S+) and (\S+) \(", line)) == HALVED
        text = pretrain(1, run, adam, "--adamw-from-muon", script=script, **PATHS)
        assert first_rates(text) == FIRST, text[-3000:]
        return
    assert not lines
    finds_none = version() >= (0, 19)
    text = pretrain(1, run, adam, script=script, fails=finds_none, **PATHS)
    why = (
        "finds the checkpoint's parameter groups by"
        if finds_none
        else "changed the rates of "
    )
    assert "--override-opt_param-scheduler: " in text and why in text, text[-3000:]
    assert finds_none or not first_rates(text) <= FIRST


@pytest.mark.parametrize("saved_by", ["muon", "adamw"])
def test_an_earlier_checkpoint_loads_with_the_state_that_it_was_saved_with(
    saved_by: str, tmp_path: Path
) -> None:
    """Megatron takes the latest one's moments with it, in the format torch."""
    where = f"--save {tmp_path} --save-interval 2 --ckpt-format torch"
    run = f"--bf16 --use-distributed-optimizer --lr-decay-style constant {where}"
    optimizer = "--optimizer muon" if saved_by == "muon" else "--optimizer adam"
    text = pretrain(1, run, optimizer)
    again = f"--load {tmp_path} --ckpt-step 2 --muon-from-adamw momentum"
    after = steps(pretrain(1, run, "--optimizer muon", again))
    assert list(after) == [3, 4, 5, 6]
    # the second line has the mean of the first two after a start
    if saved_by == "muon":
        assert [after[n] for n in (3, 5, 6)] == [steps(text)[n] for n in (3, 5, 6)]
        return
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = f"--load {tmp_path} --muon-from-adamw momentum"
    assert steps(pretrain(1, run, "--optimizer muon", again)) == after


def test_another_tp_at_a_resume_names_what_loads_there(tmp_path: Path) -> None:
    """In the format that a save has by default; Megatron's error names another flag."""
    needs_torch_dist()
    where = f"--ckpt-format torch_dist --save {tmp_path} --load {tmp_path}"
    where += " --save-interval 100"
    for optimizer in (MUON, f"{MUON} --optimizer adam"):
        pretrain(2, optimizer, where, LAYOUTS["tp2"][1], "--exit-interval 2")
        text = pretrain(1, optimizer, where, fails=True)
        assert (
            "ValueError: (TP, PP) mismatch after resume ((1, 1) vs (2, 1) from "
            "checkpoint): this checkpoint's optimizer state loads at the saved TP and "
            "PP only. Resume there and save once with "
            "--dist-ckpt-optim-fully-reshardable;"
        ) in text
        assert "--ckpt-fully-parallel-save" not in text
        shutil.rmtree(tmp_path)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_experts_at_another_dp_size_name_the_flag(
    optimizer: str, tmp_path: Path
) -> None:
    """Megatron of core 0.16 saves random states by DP rank then; others save one."""
    needs_torch_dist()
    run = f"--optimizer {optimizer} --use-distributed-optimizer --bf16 {EXPERTS}"
    run += " --lr-decay-style constant --ckpt-format torch_dist --train-iters 4"
    where = f"--save {tmp_path} --load {tmp_path} --save-interval 2"
    pretrain(4, run, where, "--exit-interval 2")
    if (0, 16) <= version() < (0, 17):
        text = pretrain(2, run, where, fails=True)
        assert "Give --no-load-rng: dropout and a router's noise start anew" in text
    text = pretrain(2, run, where, "--no-load-rng")
    assert list(steps(text)) == [3, 4]
