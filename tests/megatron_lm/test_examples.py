"""examples/: what each script asks Megatron for, and with a checkout that SMOKE=1
trains.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/test_examples.py, with
tests/requirements-pretrain.txt installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import PYTHON311, ROOT, TESTS, te_on_cpu
from support.megatron_lm.scripts import CHECKOUT, needs_checkout
from support.processes import ended, succeeded

EXAMPLES = ROOT / "examples"
SCRIPT = TESTS / "support" / "te_on_cpu" / "script"
SCENARIOS = ("gpt_340m", "moe_1b", "moonlight_mla")
pytestmark = pytest.mark.timeout(900)

# Of core 0.19 and later, whose local layers refuse --qk-layernorm without a rank for
# queries.
REFUSES_QK_NORM = "megatron/core/transformer/mla_qk_norm_config.py"


def environment(folder: Path, **variables: object) -> dict[str, str]:
    """Of a script; programs in ``folder`` come before all others, Python modules there
    too.
    """
    python = Path(sys.executable)
    # torchrun is beside this Python; make takes python3 and python3-config from PATH
    path = [
        str(folder),
        str(python.parent),
        str(python.resolve().parent),
        os.environ["PATH"],
    ]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON")}
    given = {key: str(value) for key, value in variables.items()}
    own = {"PATH": os.pathsep.join(path), "PYTHONPATH": str(folder)}
    return {**inherited, **own, **given}


def start(
    script: Path, env: dict[str, str], *flags: str
) -> subprocess.CompletedProcess[str]:
    folder = env["PATH"].split(os.pathsep)[0]
    return ended("bash", script, *flags, env=env, cwd=folder, timeout=800)


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A folder with a torchrun that prints its arguments, and an empty checkout."""
    program(tmp_path, "torchrun", "printf '%s\\n' \"$@\"")
    (tmp_path / "pretrain_gpt.py").touch()
    return tmp_path


def asked(standin: Path, name: str, *flags: str, **variables: object) -> list[str]:
    """The words that torchrun gets from a script."""
    env = environment(standin, MEGATRON_LM_PATH=standin, **variables)
    done = start(EXAMPLES / name / "training.sh", env, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def has(words: list[str], wanted: str) -> bool:
    """Whether a flag and its value stand in ``words``, side by side."""
    parts = wanted.split()
    return any(words[i : i + len(parts)] == parts for i in range(len(words)))


# --- without a checkout ---------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_folder_is_complete_and_its_script_short(name: str) -> None:
    folder = EXAMPLES / name
    training = folder / "training.sh"
    assert (folder / "README.md").exists()
    lines = training.read_text().splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    for script in (training, folder / "train.sbatch", EXAMPLES / "start.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert f"({name}/README.md)" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_a_checkout_the_error_says_how_to_get_one(
    name: str, tmp_path: Path
) -> None:
    for given in ({}, {"MEGATRON_LM_PATH": tmp_path}):
        done = start(EXAMPLES / name / "training.sh", environment(tmp_path, **given))
        assert done.returncode == 2
        message = (
            f"MEGATRON_LM_PATH='{given.get('MEGATRON_LM_PATH', '')}' is no "
            "Megatron-LM chec"
        )
        assert done.stderr.startswith(message)
        assert (
            "git clone --depth 1 -b core_v0.16.1 https://github.com/NVIDIA"
            in done.stderr
        )


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_adamw_twin_differs_in_nothing_else(name: str, standin: Path) -> None:
    muon, adam = (
        " ".join(asked(standin, name, OPTIMIZER=given)) for given in ("muon", "adam")
    )
    ours = "--optimizer muon --muon-matched-adamw-rms 0.2"
    assert muon.count(ours) == 1 and muon.replace(ours, "--optimizer adam") == adam
    env = environment(standin, MEGATRON_LM_PATH=standin, OPTIMIZER="sgd")
    done = start(EXAMPLES / name / "training.sh", env)
    assert (done.returncode, done.stderr) == (
        2,
        "OPTIMIZER is muon or adam, not 'sgd'\n",
    )


@pytest.mark.parametrize("smoke", [0, 1])
@pytest.mark.parametrize("name", SCENARIOS)
def test_variables_and_flags_reach_megatron(
    name: str, smoke: int, standin: Path
) -> None:
    words = asked(
        standin, name, "--seed", "7", LAYERS=6, LR=0.5, TP=4, SEQ_LENGTH=32, NNODES=2,
        NODE_RANK=1, DATA_PATH="0.4 one 0.6 two", TOKENIZER="--tokenizer-type X",
        SAVE="a folder", SMOKE=smoke, MASTER_ADDR="elsewhere", GPUS_PER_NODE=3,
    )  # fmt: skip
    assert words[-2:] == ["--seed", "7"] and "--mock-data" not in words
    for wanted in (
        "--num-layers 6",
        "--lr 0.5",
        "--tensor-model-parallel-size 4",
        "--data-path 0.4 one 0.6 two",
        "--tokenizer-type X",
        "--nproc-per-node 3 --nnodes 2 --node-rank 1 --master-addr elsewhere "
        "--master-port 6000",
    ):
        assert has(words, wanted), wanted
    assert words[words.index("--save") + 1] == "a folder"


def test_each_validation_set_gets_a_loss(standin: Path) -> None:
    words = asked(standin, "moe_1b", DATA_PATH="0.4 a 0.6 b", VALID_DATA_PATH="c d")
    sets = "--multiple-validation-sets --full-validation"
    assert has(words, f"--train-data-path 0.4 a 0.6 b --valid-data-path c d {sets}")
    assert not {"--split", "--data-path", "--mock-data"} & set(words)


def test_moe_1b_with_long_sequences_sees_as_many_tokens(standin: Path) -> None:
    words = asked(standin, "moe_1b", SEQ_LENGTH=8192, GLOBAL_BATCH_SIZE=288)
    for wanted in (
        "--seq-length 8192",
        "--global-batch-size 288",
        "--train-samples 12207031",
    ):
        assert has(words, wanted)


# --- with a checkout ------------------------------------------------------------------

PARSE = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
from megatron.training.arguments import add_megatron_arguments
from megatron_muon.megatron_lm.flags.parser import add_flags
for words in json.load(sys.stdin):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_flags(parser)
    parser.parse_args(words)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder whose Python has what a newer Megatron takes from Python 3.12."""
    shutil.copytree(PYTHON311, tmp_path, dirs_exist_ok=True)
    return tmp_path


@needs_checkout
def test_megatron_knows_every_flag_and_value(standin: Path, machine: Path) -> None:
    command_lines = []
    for name in SCENARIOS:
        for given in (
            {},
            {"SMOKE": 1},
            {"OPTIMIZER": "adam"},
            {"SAVE": "x", "DATA_PATH": "x"},
        ):
            words = asked(standin, name, **given)
            command_lines.append(words[words.index(f"{standin}/pretrain_gpt.py") + 1 :])
    env = environment(machine)
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    command = sys.executable, "-c", PARSE, CHECKOUT
    succeeded(*command, input=json.dumps(command_lines), env=env)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def smoke(machine: Path, name: str, *flags: str, **variables: object) -> str:
    """What a script prints with SMOKE=1; the test fails where it fails."""
    given = {
        "MEGATRON_LM_PATH": CHECKOUT,
        "MASTER_PORT": free_port(),
        "SMOKE": 1,
        **variables,
    }
    done = start(EXAMPLES / name / "training.sh", environment(machine, **given), *flags)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    return text


def assert_trained(text: str, optimizer: str) -> None:
    """Eight steps; the mean loss of the last three is below that of the first step."""
    losses = [float(loss) for loss in re.findall(r"iteration .*lm loss: (\S+)", text)]
    assert len(losses) == 8 and sum(losses[-3:]) / 3 < losses[0] - 0.1, losses
    assert re.search(rf"^ *optimizer \.+ {optimizer}$", text, re.MULTILINE)
    assert ("is active: Distributed Muon" in text) == (optimizer == "muon")


@needs_checkout
@pytest.mark.parametrize(
    "name, optimizer, variables",
    [
        ("gpt_340m", "muon", {}),
        ("gpt_340m", "adam", {"TP": 1, "GPUS_PER_NODE": 2}),
        ("moe_1b", "muon", {}),
        ("moe_1b", "adam", {"EP": 2}),
        ("moonlight_mla", "muon", {}),
        ("moonlight_mla", "adam", {"EP": 2, "GPUS_PER_NODE": 2}),
    ],
)
def test_smoke_trains(
    name: str, optimizer: str, variables: dict, machine: Path
) -> None:
    flags = []
    if name == "moonlight_mla" and (CHECKOUT / REFUSES_QK_NORM).exists():
        flags = ["--q-lora-rank", "32"]  # the README says why
    text = smoke(machine, name, *flags, OPTIMIZER=optimizer, **variables)
    assert_trained(text, optimizer)
    assert "[megatron_muon] --muon-cpu: Megatron runs on the CPU" in text
    assert text.count("on the CPU: --distributed-backend gloo in place of nccl") == 1
    if optimizer == "adam" and name != "gpt_340m":
        assert (
            "[megatron_muon] --weight-decay-all-params: AdamW decays norms' gammas"
            in text
        )


@needs_checkout
@pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path")
@pytest.mark.parametrize("name", SCENARIOS)
def test_smoke_trains_with_transformer_engines_modules(
    name: str, tmp_path: Path
) -> None:
    """As users run it: its Python is real, products and norms are the stub's, and
    attention is Megatron's. Scripts get all three through sitecustomize.
    """
    on = [SCRIPT, PYTHON311, ROOT, TESTS, os.environ["PYTHONPATH"]]
    text = smoke(
        *(tmp_path, name, "--transformer-impl", "transformer_engine"),
        PYTHONPATH=os.pathsep.join(map(str, on)),
        OPTIMIZER="muon",
    )
    assert_trained(text, "muon")
    assert "--transformer-impl local in place of" not in text
    assert re.search(r"^ *transformer_impl \.+ transformer_engine$", text, re.MULTILINE)


@needs_checkout
def test_two_nodes_train_as_one(machine: Path) -> None:
    """Two launchers on this machine, as two nodes would start them; here each has one
    process.
    """
    given = {
        "MEGATRON_LM_PATH": CHECKOUT,
        "MASTER_PORT": free_port(),
        "SMOKE": 1,
        "TP": 1,
        "PP": 1,
    }
    nodes = [
        subprocess.Popen(
            ["bash", str(EXAMPLES / "gpt_340m" / "training.sh")],
            env=environment(
                machine, **given, NNODES=2, NODE_RANK=rank, GPUS_PER_NODE=1
            ),
            cwd=machine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        texts = [node.communicate(timeout=800)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], (
        texts[0][-2000:] + texts[1][-2000:]
    )
    assert "data-parallel size: 2" in texts[0]
    assert_trained("".join(texts), "muon")
