"""Arguments of every command: ``--help`` without a Megatron, and wrong ones, before any
work.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon.lab.commands import BENCHES, COMMANDS, GONE, main
from support.models.model_flags import TINY as TINY_WORDS
from support.processes import python

LINES = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)]
OF_TORCH = [["bench", "newton-schulz"]]  # torch's own speeds
# without what only some environments have; prints each help, or what went wrong
CODE = """
import sys
for name in LACKS:
    sys.modules[name] = None
from megatron_muon.lab.commands import main
for line in LINES:
    try:
        print(main([*line, "--help"]))
    except SystemExit as ended:
        print(ended.code)
    print("END")
"""


def printed_helps(lines: list[list[str]], *lacks: str) -> list[str]:
    """The help of each line in a process where some modules cannot be imported."""
    code = CODE.replace("LINES", repr(lines)).replace("LACKS", repr(lacks))
    done = python("-c", code, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("END\n")[:-1]


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """By the line."""
    lacks = "megatron", "pandas", "matplotlib", "tensorboard"
    others = [line for line in LINES if line not in OF_TORCH]
    texts = printed_helps(others, *lacks, "numpy", "torch") + printed_helps(
        OF_TORCH, *lacks
    )
    return dict(zip(map(" ".join, [*others, *OF_TORCH]), texts, strict=True))


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_help_needs_no_megatron_and_fits_a_terminal(
    line: list[str], helps: dict[str, str]
) -> None:
    *lines, status = helps[" ".join(line)].splitlines()
    assert (
        lines[0].startswith(" ".join(["usage: megatron-muon", *line])) and status == "0"
    )
    assert len(lines) <= 60 and max(map(len, lines)) <= 80


def test_there_are_at_most_eight_commands() -> None:
    assert len(COMMANDS) <= 8


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "x"]) == 2
    assert capsys.readouterr().err == f"megatron-muon {name} is gone: {GONE[name]}\n"


TINY = " ".join([*TINY_WORDS, "--world-size 4"])
SAID = {
    (
        "accept out --only speed"
    ): "--only speed: choose from bits, checkpoint, cost, doctor",
    "accept out --minutes 0": "argument --minutes: must be",
    "bench newton-schulz --device nowhere": "--device nowhere: cpu, cuda or cuda:N",
    "bench newton-schulz --shapes 64": "a shape is ROWSxCOLS, got '64'",
    "bench step --ep 2 --num-experts 3": "--num-experts 3 is not a multiple of --ep 2",
    (
        "bench step --tp 2 --dp 4"
    ): "DP needs 8 GPUs (one per rank), but only 3 are visible",
    # those of Megatron-LM's that rows cannot have, or would not feel
    "bench step --fp16 --dp 1": "--fp16 cannot be given here: every row is in bf16",
    "bench step --lr 1e-3": "unrecognized arguments: --lr 1e-3",
    "doctor .": "is no Megatron-LM checkout: give the folder with pretrain",
    "curves x/a.json y/a.json": "give two runs or more, of different names",
    "curves a=1 b=2 --tag loss=x": "--tag is KIND=NAME",
    (
        f"plan {TINY} --hardware tpu"
    ): "--hardware tpu: neither a file nor one of h100, h200, b200",
    f"plan {TINY} --set launch_us=fast": "'fast' is not a finite number",
    f"plan {TINY} --stage 3": "--stage 3: the last pipeline stage is 0",
    (
        f"plan {TINY} --muon-full-period 5"
    ): "with TP 1 there are no slices, so every step is full",
    f"plan {TINY} --muon-exclude *": "Muon has none of the model's",
    f"plan {TINY} --sweep tp": "--sweep tp: give NAME=VALUE,VALUE,...",
    f"plan {TINY} --sweep dp=": "--sweep dp=: give NAME=VALUE,VALUE,...",
    f"plan {TINY} --sweep lr=1e-3,1e-4": "unrecognized arguments: --lr 1e-3",
    f"plan {TINY} --sweep json=/x": "json=/x: --json says what is printed, not what",
    f"plan {TINY} --sweep explain=given": "--explain says what is printed, not what",
    (
        "routes --num-layers 2 --no-such 3"
    ): "unrecognized arguments: --no-such 3: without a run's",
    "routes --num-layers 2 x.py --lr 1": "arguments: --num-layers 2: the run's own",
    "routes --model llama3-8b x.py": "--model takes the place of a script: use",
    "trace report": "the following arguments are required: TRACE",
    "trace merge .": "is gone: https://ui.perfetto.dev opens several",
    "checkpoint inspect": "the following arguments are required: PATH",
    "checkpoint repair .": "unrecognized arguments: .",
    # a mistyped flag: of a command, of Muon's, of Megatron's
    "trace report . --jsn x": "arguments: --jsn x; the nearest: --json",
    f"plan {TINY} --muon-ns-step 6": "; the nearest: --muon-ns-steps, --muon-num-ns-",
    "bench step --num-layer=2": "arguments: --num-layer=2; the nearest: --num-layers",
}
# an escape that recolours a terminal, where a user's own words are quoted
SAID |= {
    f"plan {TINY} --set \x1b[31mx=1": r"--set \x1b[31mx=1: give NAME=VALUE",
    f"plan {TINY} --hardware \x1b[31mx": r"--hardware \x1b[31mx: neither a file nor",
    f"plan {TINY} \x1b[31mx": r"unrecognized arguments: \x1b[31mx: without a run's",
    "doctor \x1b[31mx": r"\x1b[31mx is no Megatron-LM checkout",
}
FILES = (
    "accept out",
    "bench step",
    "curves a=1 b=2",
    f"plan {TINY}",
    "routes",
    "trace report .",
)
SAID |= {
    f"{line} --json no/x.json": "--json no/x.json: there is no folder no"
    for line in FILES
}


@pytest.mark.parametrize("line", SAID)
def test_what_is_wrong_is_named(
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    try:
        status = main(line.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and SAID[line] in err.splitlines()[-1], err
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main_of_curves(argv: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr("megatron_muon.lab.curves.command.main", main_of_curves)
    assert main(["curves", "a=1", "b=2"]) == 1
    said = capsys.readouterr().err
    assert said == "megatron-muon curves: error: it takes more memory than there is\n"
