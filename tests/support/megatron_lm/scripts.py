"""Scripts of a Megatron-LM checkout, MEGATRON_LM_PATH, as processes on this machine."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.megatron_lm.launch import version_of
from support import PYTHON311, ROOT
from support.processes import ended

CHECKOUT = Path(os.environ.get("MEGATRON_LM_PATH", "/MEGATRON_LM_PATH-is-not-set"))
HERE = Path(__file__).parent
needs_checkout: Any = pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ,
    reason="MEGATRON_LM_PATH names no Megatron-LM checkout",
)
# The mock data of 0.12 to 0.15 has tokens up to 8190, whatever the vocabulary is.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --transformer-impl local --attention-dropout 0 "
    "--hidden-dropout 0 --attention-backend unfused --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm"
)
MOCK = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 8191 "
    "--make-vocab-size-divisible-by 16"
)
RUN = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr "
    "1e-3 --lr-decay-iters 6 --weight-decay 0.1 --clip-grad 1.0 --split 90,5,5 "
    "--log-interval 1 --eval-iters 1 --eval-interval 100 --distributed-backend gloo"
)
# A script with the CPU runtime and without the plugin.
CPU_ALONE = (
    "import sys, runpy; import megatron_muon.cpu as cpu; cpu.enable(); import "
    "megatron_muon.cpu.training as training; training.enable(); sys.argv = "
    "sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
# Where a script finds Megatron without the launcher; last what a fork imports.
MORE = [*filter(None, [os.environ.get("PYTHONPATH")])]
PATHS = {"PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, ROOT, PYTHON311, *MORE)))}
MUON = "--optimizer muon --use-distributed-optimizer"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
    "--disable-bias-linear --expert-model-parallel-size 2"
)


def version() -> tuple[int, ...]:
    """Of the checkout's core."""
    return tuple(
        int(part) for part in version_of(CHECKOUT / "megatron" / "core").split(".")
    )


def needs_torch_dist(format: str = "torch_dist") -> None:
    """Skip a test where this Megatron cannot save in that format."""
    if format == "torch_dist" and version() < (0, 15):
        pytest.skip(
            "this Megatron's writer of torch_dist fails with torch 2.13, AdamW's too"
        )


def environment(**more: str) -> dict[str, str]:
    python = Path(sys.executable)
    # make takes python3 and python3-config from PATH
    path = [str(python.parent), str(python.resolve().parent), os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PYTHON311), *MORE]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def done(command: list[str], fails: bool = False, **more: str) -> str:
    """What a command prints; the test fails where it fails (or does not, if it
    should).
    """
    result = ended(*command, env=environment(**more), timeout=800)
    text = result.stdout + result.stderr
    assert (result.returncode != 0) == fails, text[-6000:]
    return text


def words(*options: str) -> list[str]:
    return [word for option in options for word in option.split()]


def pretrain(
    processes: int,
    *options: str,
    data: str = MOCK,
    script: Path | None = None,
    model: str = MODEL,
    fails: bool = False,
    **more: str,
) -> str:
    """``pretrain_gpt.py``, or another script, through torchrun and the launcher."""
    command = pretrain_command(
        processes, *options, data=data, script=script, model=model
    )
    return done(command, fails, **more)


def pretrain_command(
    processes: int,
    *options: str,
    data: str = MOCK,
    script: Path | None = None,
    model: str = MODEL,
) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "megatron_muon"]
    return [
        *command,
        str(script or CHECKOUT / "pretrain_gpt.py"),
        *words(model, data, RUN, *options),
    ]


def without_plugin(
    processes: int, *options: str, model: str = MODEL, fails: bool = False, **more: str
) -> str:
    """``pretrain_gpt.py`` with the CPU runtime, but without the launcher and the
    plugin.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        f"--nproc-per-node={processes}",
        "--no-python",
        sys.executable,
        "-c",
        CPU_ALONE,
    ]
    command += [str(CHECKOUT / "pretrain_gpt.py"), *words(model, MOCK, RUN, *options)]
    return done(command, fails, **{**PATHS, **more})


def alone(*options: str, script: str = "pretrain_gpt.py", fails: bool = False) -> str:
    """A script through the launcher in one process, for what comes before any rank is
    needed.
    """
    command = [sys.executable, "-m", "megatron_muon", str(CHECKOUT / script)]
    return done([*command, *words(*options)], fails)


@cache
def known_flags() -> frozenset[str]:
    """Of ``pretrain_gpt.py``."""
    return frozenset(re.findall(r"--[\w-]+", alone("--help")))


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]


def falling(text: str) -> list[float]:
    """The losses of six steps or more, of which the third and the sixth are lower."""
    by_step = losses(text)
    assert len(by_step) >= 6 and by_step[5] < by_step[2] < by_step[0], text[-3000:]
    return by_step


def steps(text: str) -> dict[int, str]:
    """What Megatron prints of each iteration: loss, loss scale and norm, to the last
    digit.
    """
    matches = re.findall(
        r"iteration +(\d+)/.*?(lm loss: .*?nan iterations: +\d+)", text
    )
    return {int(number): line for number, line in matches}


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's own reading of its event files: value by step, by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read: Any = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: {event.step: event.value for event in read.Scalars(tag)}
        for tag in read.Tags()["scalars"]
    }


def argument(text: str, name: str) -> str:
    """The value that Megatron prints for an argument at start."""
    values = re.findall(rf"^ *{name} \.+ (.*)$", text, re.MULTILINE)
    assert len(values) == 1, (name, values)
    return str(values[0])
