"""``megatron-muon certify`` prints what a user's model does, with a verdict, on a laptop."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.commands import main
from support import ROOT
from support.models.model_flags import DEEPSEEK_V3, TINY
from support.virtual_gpu.runs import Run

PAGE = ROOT / "docs" / "certify.md"


def certified(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_muon", "certify", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def as_json(path: Path, *words: str) -> dict[str, Any]:
    ended = certified(*words, "--json", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict: dict[str, Any] = json.loads(path.read_text())
    return verdict


def of_the_page() -> list[str]:
    """The arguments of the page's command: Llama-3-8B at TP8 x DP64."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program, command, *words = block.replace("\\\n", " ").split()
    assert (program, command) == ("megatron-muon", "certify")
    return list(words)


def test_the_command_of_the_page(tmp_path: Path) -> None:
    is_certified_in_two_minutes(of_the_page(), 512, [[0]], tmp_path)


def test_deepseek_v3(tmp_path: Path) -> None:
    stages = [[0], list(range(1, 15)), [15]]
    is_certified_in_two_minutes(DEEPSEEK_V3, 64, stages, tmp_path)


def is_certified_in_two_minutes(
    words: list[str], ranks: int, stages: list[list[int]], folder: Path
) -> None:
    start = time.monotonic()
    verdict = as_json(folder / "found.json", *words)
    assert time.monotonic() - start < 120
    assert verdict["holds"] and all(claim["holds"] for claim in verdict["claims"])
    assert [kind["stages"] for kind in verdict["kinds"]] == stages
    for kind in verdict["kinds"]:
        assert kind["ranks"] == ranks and not kind["whole"]
        assert len(kind["looked_at"]) == 4
        for report in kind["looked_at"]:
            assert report["late_connections"] == 0
            assert [wait["name"] for wait in report["host_waits"]] in ([], ["item"])
            assert report["launches"] > report["muon_launches"] > 0
    assert any(report["sent"] for kind in verdict["kinds"] for report in kind["looked_at"])


def test_it_prints_every_figure_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tp=2, dp=2, hidden=256)
    assert main(["certify", *run.words(), "--muon-round-mib", "1"]) == 0
    text = capsys.readouterr().out
    for part in (
        r"only stage: stage 0; 4 ranks, all looked at",
        r"  dense: \d+ matrices in [2-9] round\(s\)",
        r"rank  launches  Muon's  NCCL's  sent  messages  host waits  state  peak  connects to",
        r"    state: .*gradients [\d.]+.*Muon's momentum [\d.]+",
        r"    above it at the peak: .*Newton-Schulz scratch [\d.]+",
        r"    muon/exchange: \d+ x \S.* over 4 ranks \(0-3 #1\), reads [\d.]+ MiB, writes",
        r"  the host waits in optimizer.step\(\):",
        r"  ok   no race: 4 rank\(s\)",
        r"3 of 3 process groups: every member is compared|every member is compared",
        r"not checked\n  elements: nothing is computed",
        r"certified on a virtual GPU in \d+ s\n$",
    ):
        assert re.search(part, text), (part, text)
    assert "FAIL" not in text and "  --  " not in text


def test_what_is_not_certified_says_so_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    assert main(["certify", *Run(dp=4).words(), "--ranks", "1", "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "  --   no rank out of order: not looked at, since no two members" in text
    assert "\nNOT certified on a virtual GPU" in text
    assert json.loads(file.read_text())["holds"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world-size", "3", "--tensor-model-parallel-size", "2"], "not a multiple of TP x CP x"),
        (["--world-size", "2", "--ranks", "0"], "argument --ranks: must be a whole number of at"),
        (["--world-size", "2", "--json", "/no/such/file"], "--json /no/such/file: there is no fol"),
        (["--world-size", "2", "--muon-backend", "upstream"], "--muon-backend upstream is not sup"),
        (["--world-size", "2", "--clip-grad", "-1"], "argument --clip-grad: must be"),
        ([], "the following arguments are required: --world-size"),
        (["--world-size", "2", "--use-torch-fsdp2"], "unrecognized arguments: --use-torch-fsdp2"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else None,
)
def test_wrong_flags_end_with_2_and_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["certify", *TINY, *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_latent_attention_and_experts_are_built(tmp_path: Path) -> None:
    """What the CPU runtime adds for them is there while it is off."""
    words = [
        *("--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16").split(),
        *("--v-head-dim 8 --qk-pos-emb-head-dim 8 --normalization RMSNorm --num-experts 4").split(),
        *("--moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --world-size 4").split(),
        *("--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear").split(),
    ]
    verdict = as_json(tmp_path / "found.json", *TINY, *words)
    (kind,) = verdict["kinds"]
    assert kind["experts"] == [False, True] and kind["whole"]
