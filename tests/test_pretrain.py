"""The real ``pretrain_gpt.py`` through the launcher, on CPU: needs a Megatron-LM checkout.

MEGATRON_LM_PATH=... pytest tests/test_pretrain.py, with tests/requirements-pretrain.txt installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MEGATRON_LM_PATH")
pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM_PATH names no Megatron-LM checkout"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parent.parent
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --transformer-impl local "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 "
    "--attention-dropout 0 --hidden-dropout 0 --attention-backend unfused --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm"
)
RUN = (
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr 1e-3 "
    "--lr-decay-iters 6 --weight-decay 0.1 --clip-grad 1.0 --bf16 --mock-data --split 90,5,5 "
    "--log-interval 1 --eval-iters 1 --eval-interval 100 --distributed-backend gloo"
)
MUON = "--optimizer muon --use-distributed-optimizer"


def pretrain(processes: int, *options: str, fails: bool = False) -> str:
    """What a run prints; the test fails where it fails (or does not, if it should)."""
    python = Path(sys.executable)
    # make takes python3 and python3-config from PATH
    path = [str(python.parent), str(python.resolve().parent), os.environ["PATH"]]
    env = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(ROOT),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "megatron_muon"]
    command += [f"{CHECKOUT}/pretrain_gpt.py", *MODEL.split(), *RUN.split()]
    command += [word for option in options for word in option.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    text = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, text[-4000:]
    return text


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, "--tensor-model-parallel-size 2"),
        (
            8,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
            "--overlap-grad-reduce --overlap-param-gather",
        ),
        (
            2,
            "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "
            "--expert-model-parallel-size 2",
        ),
    ],
    ids=["tp2", "tp2-pp2-dp2", "ep2"],
)
def test_pretrain_gpt_trains_with_muon(processes: int, layout: str) -> None:
    text = pretrain(processes, MUON, layout)
    found = losses(text)
    assert len(found) >= 6 and found[5] < found[2] < found[0]
    assert "[megatron_muon] pipeline stage 0" in text
    assert re.search(r"^ *optimizer \.+ muon$", text, re.MULTILINE)
    assert "[megatron_muon] no GPU is here" in text


def test_adam_through_the_launcher_is_megatrons() -> None:
    text = pretrain(1, "--optimizer adam --use-distributed-optimizer")
    assert losses(text)[5] < losses(text)[0]
    assert "[megatron_muon] pipeline stage" not in text
    assert re.search(r"^ *optimizer \.+ adam$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizer muon", "add --use-distributed-optimizer, or choose Megatron's own Muon"),
        (f"{MUON} --muon-momentum 2", "momentum must be in [0, 1), got 2.0"),
        (f"{MUON} --save /nowhere", "add --no-save-optim to save the model alone"),
    ],
    ids=["no-distributed-optimizer", "bad-momentum", "save"],
)
def test_wrong_flags_are_errors_before_anything_is_built(options: str, message: str) -> None:
    text = pretrain(1, options, fails=True)
    assert message in text
    assert "building GPT model" not in text
