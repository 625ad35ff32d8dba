"""What commands print fits a terminal of 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from support import benching
from support.benching import SMALL
from support.models.model_flags import LLAMA_3_8B
from support.traces import PAIR

RUN = " ".join([*LLAMA_3_8B, "--num-layers 2 --tensor-model-parallel-size 2"])
COMMANDS = [
    "plan --model llama3-8b --tp 8 --dp 8",
    f"plan --world-size 16 --assumptions {RUN}",
    f"plan --world-size 16 --explain {RUN}",
    f"plan --sweep dp=1,8,3 {RUN}",
    "routes --model llama3-8b --num-layers 2 --tp 2 --dp 2",
    f"routes --world-size 16 --muon-lr-mult *=0.5 --muon-wd-mult *qkv*=0 {RUN}",
    "doctor",
    f"trace report {PAIR / 'adamw'} {PAIR / 'muon'}",
    "curves a_run_with_a_long_name=a.jsonl,b.jsonl another_run=b.jsonl,a.jsonl",
    "bench newton-schulz --shapes 256x1024 512x512",
    "bench speeds --shape 16x64 --ranks 1",
    f"bench step {SMALL} --dp 1 --rounds 1 --parts",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:3]))
def test_lines_fit_a_terminal(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, scale in (("a", 2.0), ("b", 1.0)):
        points = [{"step": t, "lm loss": 1 + (t / scale) ** -0.5} for t in range(1, 20001, 100)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, points)))
    if command.startswith("bench s"):  # the tests' own ranks are forked from another server
        text = benching.command(command).stdout
    else:
        assert main(command.split()) == 0
        text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) > 2
    # A path stays whole.
    assert [line for line in lines if len(line) > 80 and "/site-packages/" not in line] == []
