"""``megatron-muon compare``: real trainings over gloo, its report, and going on after an end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_muon.lab.commands import main
from megatron_muon.lab.compare.figures import bound, figures
from megatron_muon.lab.compare.store import read, write
from megatron_muon.lab.compare.topology import Topology, parsed
from megatron_muon.lab.compare.training import Trained
from support import ROOT
from support.ranks import run

SMALL = (
    "--steps 5 --hidden 64 --heads 4 --layers 2 --vocab 256 --seq 32 --global-batch-size 8 "
    "--lr-adamw 1e-2 --lr-muon 5e-2 --link-mbits"
).split()


# --- real trainings ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report over a stage that sends to DP ranks, one that has TP only, and two stages."""
    made = tmp_path_factory.mktemp("compare")
    words = [*"--topologies dp3 tp2 tp2-pp2-dp2".split(), "--global-batch-size", "24"]
    words += ["--plot", str(made / "compare.png")]
    assert main(["compare", *SMALL, *words, "--folder", str(made)]) == 0
    return made


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_bytes_are_those_of_the_plan(folder: Path) -> None:
    for each in report_of(folder)["topologies"]:
        assert each["muon"]["exchange"] == each["predicted"]["exchange"]
        assert each["muon"]["busiest"] == each["predicted"]["busiest"]
        assert each["adamw"]["exchange"] == 0
        assert each["adamw"]["megatrons"] == each["muon"]["megatrons"]


def test_the_ratio_is_below_the_papers_bound_and_there_is_none_without_dp(folder: Path) -> None:
    ratios = {each["name"]: each["byte_ratio"] for each in report_of(folder)["topologies"]}
    assert ratios["tp2"] is None
    assert 1 < ratios["dp3"] < 1.1  # boundary parameters only
    assert 1 < ratios["tp2-pp2-dp2"]


def test_state_is_within_two_percent_of_the_plan(folder: Path) -> None:
    for each in report_of(folder)["topologies"]:
        for name in ("adamw", "muon"):
            planned = each["predicted"][f"{name}_state"]
            assert each[name]["state_bytes"] == pytest.approx(planned, rel=0.02)
        assert each["muon"]["state_bytes"] < each["adamw"]["state_bytes"]


def test_the_report_has_the_peak_beside_the_plans(folder: Path) -> None:
    """How near they are is the claim of ``test_peaks.py``; these sizes are smaller."""
    page, report = (folder / "report.md").read_text(), report_of(folder)
    assert "planned for CPUs with" in page and report["run"]["planned_for"].startswith("cpu")
    for each in report["topologies"]:
        for name in ("adamw", "muon"):
            measured, planned = each[name]["peak_bytes"], each["predicted"][f"{name}_peak"]
            assert each["peak_ratio"][name] == measured / planned
            assert f"| {measured / 1e6:.3f} | {planned / 1e6:.3f} | " in page


def test_both_train(folder: Path) -> None:
    for each in report_of(folder)["topologies"]:
        for name in ("adamw", "muon"):
            losses = each[name]["losses"]
            assert len(losses) == 5 and losses[-1] < losses[0] - 0.1
        assert each["adamw"]["losses"][0] == each["muon"]["losses"][0]


def test_the_page_has_every_topology_in_every_table(folder: Path) -> None:
    page = (folder / "report.md").read_text()
    for name in ("dp3", "tp2", "tp2-pp2-dp2"):
        assert page.count(f"| {name} |") == 6
    assert "AdamW sends none" in page and "1.333 times AdamW's" in page
    assert "A model, not a measurement: --link-mbits names no rate." in page
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_call_trains_what_is_missing_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.glob("*2.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("dp3-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "dp3-muon.json").write_text('{"digest": ')
    words = ["--topologies", "dp3", "--global-batch-size", "24", "--folder", str(tmp_path)]
    assert main(["compare", *SMALL, *words]) == 0
    assert capsys.readouterr().err.split() == ["training", "dp3-muon"]
    assert main(["compare", *SMALL, *words, "--lr-muon", "0.02"]) == 0
    assert capsys.readouterr().err.split() == ["training", "dp3-muon"]


def _as_a_launchers_rank(words: list[str], port: int, folder: Path) -> tuple[int, str]:
    """The command's exit status on this rank, and what it says on stderr."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the command makes its own
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    again = f"file://{folder / 'again'}"  # for the end of ``run``
    dist.init_process_group("gloo", init_method=again, rank=rank, world_size=world)
    return status, said.getvalue()


def test_under_a_launcher_its_ranks_train(tmp_path: Path) -> None:
    """A second time they read what the first rank has."""
    words = ["compare", *SMALL[:-1], "--topologies", "dp2", "dp4"]
    words += ["--folder", str(tmp_path / "report")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", "megatron_muon", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "training dp2-muon" in done.stderr
    assert done.stderr.count("slow links are modelled, not measured: a launcher has") == 1
    (tmp_path / "report" / "report.json").unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    statuses, said = zip(*run(_as_a_launchers_rank, 2, words, port, tmp_path), strict=True)
    assert statuses == (0, 0) and "training" not in "".join(said)
    assert "".join(said).count("slow links are modelled, not measured: a launcher has") == 1
    (topology,) = report_of(tmp_path / "report")["topologies"]
    assert (
        topology["name"] == "dp2"
        and topology["muon"]["exchange"] == topology["predicted"]["exchange"]
    )


# --- arguments and figures --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--topologies", "dp"], "'dp' is no topology"),
        (["--topologies", "dp2-dp2"], "is no topology"),
        (["--topologies", "ep2"], "is no topology"),
        (["--topologies", "pp3"], "--layers 2 is not a multiple of pp3's pp"),
        (["--topologies", "dp3"], "--global-batch-size 8 is not a multiple of"),
        (["--topologies", "dp2", "--fp16"], "--fp16 cannot be given here"),
        (["--topologies", "dp2", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_wrong_arguments_end_before_a_rank_starts(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", *SMALL, "--folder", str(tmp_path), *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_topology_says_its_sizes() -> None:
    assert parsed("tp2-pp2-dp2") == Topology(tp=2, pp=2, dp=2)
    assert str(parsed("DP4-TP2")) == "tp2-dp4" and parsed("cp2-dp2").world == 4


def test_the_papers_bound_follows_from_the_dtypes() -> None:
    assert bound(4, 4, 2) == 1.25  # arXiv 2502.16982, section 2.3
    assert bound() == pytest.approx(4 / 3) and bound(2, 2, 2) == 1.5


def test_the_slowest_and_the_fullest_rank_count() -> None:
    ranks = [
        Trained([], 10.0, 2.0, {"grad_reduce": 6, "gather": 1}, 8, 3, 7),
        Trained([5.0, 4.0], 12.0, 1.0, {"grad_reduce": 6, "scatter": 4}, 9, 2, 6),
    ]
    summary = figures("muon", ranks)
    assert (summary.step_ms, summary.optimizer_ms, summary.share) == (12.0, 2.0, 2.0 / 12.0)
    assert (summary.megatrons, summary.exchange, summary.busiest) == (12, 5, 4)
    assert (summary.state_bytes, summary.peak_bytes, summary.losses) == (9, 3, (5.0, 4.0))
    assert summary.link_bytes == 7


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"digest": "x", "ranks": 1}', '{"digest": "x", "ranks": [{"losses": 1}]}',
     '{"digest": "other", "ranks": []}', '{"digest": "x", "ranks": ' + "[" * 100_000],
)  # fmt: skip
def test_what_cannot_be_read_is_measured_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read(tmp_path / "a.json", "x") is None
    assert read(tmp_path / "none.json", "x") is None
    write(tmp_path / "a.json", "x", [Trained([1.0], 2.0, 1.0, {"gather": 3}, 4, 5, 6)])
    assert read(tmp_path / "a.json", "x") == [Trained([1.0], 2.0, 1.0, {"gather": 3}, 4, 5, 6)]
