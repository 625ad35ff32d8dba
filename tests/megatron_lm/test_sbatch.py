"""examples/*/train.sbatch: what each asks Slurm for, and what its tasks get from
stand-ins.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_examples import EXAMPLES, SCENARIOS, environment, has, program

from support import ROOT
from support.processes import ended

HOSTS = "\n".join(f"n{number}" for number in range(20_000))  # more than a pipe holds
JOB = {
    "SLURM_NNODES": 2,
    "SLURM_JOB_NODELIST": "n[3-4]",
    "SLURM_CPUS_PER_TASK": 64,
    "SLURM_JOB_ID": 7,
}


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with scontrol, an srun of two nodes, and a torchrun; each prints what it
    was given.

    As srun from 22.05 on, this one gives a task a single CPU unless it is asked for
    more, and a bound one unless it is told not to bind.
    """
    (tmp_path / "hosts").write_text(HOSTS)
    program(
        tmp_path,
        "scontrol",
        f'[[ "$*" == "show hostnames n[3-4]" ]] && cat {tmp_path}/hosts',
    )
    program(
        tmp_path,
        "srun",
        "cpus=1 bound=yes; while [[ $1 == --* ]]; do case $1 in --cpus-per-task=*) "
        "cpus=${1#*=} ;; "
        "--cpu-bind=none) bound=no ;; esac; shift; done\n"
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; echo "task $cpus $bound"; "$@"; done',
    )
    text = 'printf \'%s\\n\' "threads $OMP_NUM_THREADS" "$@"'
    program(tmp_path, "torchrun", text)
    (tmp_path / "pretrain_gpt.py").touch()
    return tmp_path


def run(
    slurm: Path, name: str, *words: str, **variables: object
) -> subprocess.CompletedProcess[str]:
    env = environment(slurm, MEGATRON_LM_PATH=slurm, **{**JOB, **variables})
    env = {key: value for key, value in env.items() if key != "OMP_NUM_THREADS"}
    return ended("bash", EXAMPLES / name, *words, env=env, cwd=ROOT)


def tasks(slurm: Path, name: str, **variables: object) -> list[list[str]]:
    """The words that each node's torchrun gets, after those on its task."""
    done = run(slurm, f"{name}/train.sbatch", **{"SAVE": "a folder", **variables})
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    second = words.index("task 64 no", 1)
    return [words[:second], words[second:]]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_has_whole_nodes_a_log_of_its_own_and_may_be_requeued(name: str) -> None:
    batch = EXAMPLES / name / "train.sbatch"
    asked = dict(
        re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)$", batch.read_text(), re.MULTILINE)
    )
    assert asked["job-name"] == name and asked["ntasks-per-node"] == "1"
    assert asked["exclusive"] == asked["requeue"] == ""
    # a requeued job's log too
    assert "%j" in asked["output"] and asked["open-mode"] == "append"
    assert int(asked["cpus-per-task"]) >= int(asked["gpus-per-node"]) == 8


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_node_has_one_torchrun_all_its_cpus_and_what_the_job_saved(
    name: str, slurm: Path
) -> None:
    for rank, words in enumerate(tasks(slurm, name)):
        wanted = f"--nnodes 2 --node-rank {rank} --master-addr n0 --master-port 10007"
        assert has(words, f"--nproc-per-node 8 {wanted}")
        assert words[:2] == ["task 64 no", "threads 8"]
        for flag in ("--save", "--load"):  # as a requeued job needs it
            assert words[words.index(flag) + 1] == "a folder"
    assert tasks(slurm, name, GPUS_PER_NODE=3)[0][1] == "threads 22"


@pytest.mark.parametrize("name", SCENARIOS)
def test_jobs_have_ports_of_their_own_below_the_ephemeral_ones(
    name: str, slurm: Path
) -> None:
    ports = set()
    for job in (1, 2, 19_999, 20_000, 4_000_000_003):
        words = tasks(slurm, name, SLURM_JOB_ID=job)[1]
        ports.add(int(words[words.index("--master-port") + 1]))
    assert len(ports) == 5 and min(ports) > 1024 and max(ports) < 32768
    assert has(tasks(slurm, name, MASTER_PORT=6000)[0], "--master-port 6000")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_without_a_folder_or_whose_nodes_are_unknown_ends(
    name: str, slurm: Path
) -> None:
    lost = {"SAVE": "x", "SLURM_JOB_NODELIST": "n[8-9]"}
    for given, said in (({}, "SAVE: name a folder for checkpoints"), (lost, "")):
        done = run(slurm, f"{name}/train.sbatch", **given)
        assert done.returncode != 0 and done.stdout == "" and said in done.stderr


def test_a_comparison_has_the_topologies_of_its_gpus(slurm: Path) -> None:
    given = slurm, "evidence/compare.sbatch", "--hidden", "4096"
    done = run(*given, FOLDER="a folder")
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    assert words[:2] == ["task 64 no", "threads 8"] and words.count("task 64 no") == 2
    for rank in range(2):
        assert has(words, f"--node-rank {rank} --master-addr n0 --master-port 10007")
    assert has(words, "examples/evidence/compare.py --topologies")
    assert has(words, "--topologies dp16 tp8-dp2 tp2-dp8 tp2-pp2-dp4 --folder")
    assert words[words.index("--folder") + 1] == "a folder"
    assert words[-2:] == ["--hidden", "4096"]
    done = run(*given, FOLDER="")
    assert (
        done.returncode != 0 and "FOLDER: name a folder for the report" in done.stderr
    )
