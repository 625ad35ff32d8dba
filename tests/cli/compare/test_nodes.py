"""``compare --nodes``: a launcher's nodes are counted; without one its commands are printed."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.lab.commands import main
from megatron_muon.lab.compare.nodes import fitting, require_nodes, without
from support import ROOT

SMALL = "--steps 3 --hidden 64 --heads 4 --layers 2 --vocab 256 --seq 32 --global-batch-size 8"


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of the error without a launcher, but for the usage."""
    with pytest.raises(SystemExit) as ended:
        main(["compare", *shlex.split(words)])
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2].splitlines()


# --- without a launcher -----------------------------------------------------------------------


def test_the_commands_are_printed_and_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, torchrun, _, sbatch = printed(
        f"--nodes 4 --topologies tp4-dp4 --hidden 128 --folder {tmp_path}/report", capsys
    )
    assert said.startswith("--nodes 4 takes a launcher") and "4 ranks a node (for tp4-dp4)" in said
    assert torchrun == (
        "  torchrun --nnodes 4 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint "
        "FIRST_NODE:29400 -m megatron_muon compare --nodes 4 "
        f"--folder {tmp_path}/report --topologies tp4-dp4 --hidden 128"
    )
    assert sbatch == (
        f"  FOLDER={tmp_path}/report TOPOLOGIES=tp4-dp4 GPUS_PER_NODE=4 sbatch --nodes 4 "
        "--gpus-per-node 4 examples/evidence/compare.sbatch --hidden 128"
    )
    assert not (tmp_path / "report").exists()


def test_without_topologies_they_are_those_of_eight_gpus_a_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    torchrun, sbatch = printed("--nodes 2", capsys)[1::2]
    ours = "dp16 tp8-dp2 tp2-dp8 tp2-pp2-dp4"  # test_sbatch.py: the batch file's
    assert f"--topologies {ours} --global-batch-size=32" in torchrun
    assert f"TOPOLOGIES='{ours}' sbatch --nodes 2 examples" in sbatch
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert "--nproc-per-node 4 " in printed("--nodes 2", capsys)[1]


def test_one_node_may_be_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed("--nodes 1 --topologies pp3", capsys)
    assert line == "--layers 4 is not a multiple of pp3's pp"


def test_ranks_that_nodes_cannot_share_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed("--nodes 3 --topologies dp4 tp2", capsys)
    assert "no topology of dp4, tp2 has the same number of ranks on each node" in line
    (line,) = printed("--nodes 2 --topologies ep2", capsys)
    assert "'ep2' is no topology" in line


def test_topologies_fit_any_number_of_gpus() -> None:
    assert [str(one) for one in fitting(3, 1)] == ["dp3"]
    assert [str(one) for one in fitting(3, 2)] == ["dp6", "tp2-dp3"]
    for nodes in range(1, 9):
        for each in range(1, 9):
            assert {one.world for one in fitting(nodes, each)} == {nodes * each}


def test_flags_go_with_their_values() -> None:
    words = "--topologies dp2 tp2 --seq 8 --folder=x --nodes 2 --swiglu".split()
    flags = ("--topologies", "--folder", "--nodes")
    assert without(words, flags) == ["--seq", "8", "--swiglu"]


# --- under a launcher -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}, "2 nodes (GROUP"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, "1 node (WORLD_SIZE=8, LOCAL_WORLD_SIZE=8)"),
        ({"WORLD_SIZE": "8", "SLURM_NNODES": "3"}, "3 nodes (SLURM_NNODES=3)"),
        ({"SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"}, "2 nodes (SLURM_STEP_NUM_NODES=2)"),
    ],
)
def test_another_number_of_nodes_is_an_error_with_both(
    environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match="--nodes 4") as error:
        require_nodes(4, environment)
    assert f"has started ranks on {said}" in str(error.value)
    assert "torchrun with --nnodes 4" in str(error.value)
    require_nodes(int(said[0]), environment)


def test_a_launcher_that_does_not_say_is_an_error() -> None:
    with pytest.raises(ValueError, match="sets none of GROUP_WORLD_SIZE, LOCAL_WORLD_SIZE"):
        require_nodes(1, {"WORLD_SIZE": "8", "RANK": "0"})


def test_the_printed_command_runs_on_two_nodes_and_on_no_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both nodes are this machine, with an agent of torchrun each."""
    folder = tmp_path / "report"
    words = shlex.split(printed(f"--nodes 2 --topologies dp2 {SMALL} --folder {folder}", capsys)[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("FIRST_NODE:29400", f"127.0.0.1:{port}") for word in words]
    assert words[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    nodes = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ends = [node.communicate(timeout=300)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ends
    (topology,) = json.loads((folder / "report.json").read_text())["topologies"]
    assert topology["name"] == "dp2"

    alone = [*command[: command.index("--nnodes")], "--standalone", "--nproc-per-node", "1"]
    alone += [*command[command.index("-m", 3) :], "--folder", str(tmp_path / "other")]
    done = subprocess.run(
        alone, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    assert "--nodes 2, and the launcher has started ranks on 1 node (GROUP" in done.stderr
    assert not (tmp_path / "other").exists()
