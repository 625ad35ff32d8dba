"""A rank whose environment differs from the others' changes no bit, or ends all with an
error.

The processes are started here: an environment is read at a process's start.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from support.models.gpt import Case, start, take_steps
from support.processes import environment
from support.ranks import run
from support.runs.topologies import DP2_OVERLAP

RANK = """
import sys
import megatron_muon

megatron_muon.cpu.enable(allow_cuda=True)
import torch.distributed as dist
from test_environments import digest

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
print("DONE", digest())
dist.destroy_process_group()  # else torch's threads may abort the interpreter's end
"""
# NVIDIA's containers set the first.
OTHERWISE = """
TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 NVIDIA_TF32_OVERRIDE=1 OMP_NUM_THREADS=3
MKL_NUM_THREADS=3 PYTHONHASHSEED=7 LC_ALL=C TZ=Asia/Tokyo NCCL_DEBUG=INFO
CUDA_DEVICE_MAX_CONNECTIONS=8 TORCH_NCCL_AVOID_RECORD_STREAMS=1
CUBLAS_WORKSPACE_CONFIG=:4096:8
"""


def digest() -> str:
    """Of this rank's weights after two steps."""
    built = start(Case(gated=True), DP2_OVERLAP)
    take_steps(built, range(2))
    bits = hashlib.sha256()
    for chunk in built.chunks:
        for name, param in sorted(chunk.named_parameters()):
            bits.update(name.encode() + param.detach().float().numpy().tobytes())
    return bits.hexdigest()


def digests(rendezvous: Path, **of_rank_1: str) -> list[str]:
    """Of both ranks, where the second one has more in its environment."""
    plain = environment(
        Path(__file__).parent, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(rendezvous)],
            env={**plain, **(of_rank_1 if rank else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=120) for rank in ranks]
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors
    lines = [line for out, _ in ended for line in out.splitlines()]
    return [line.removeprefix("DONE ") for line in lines if line.startswith("DONE ")]


def test_another_environment_on_one_rank_changes_no_bit(tmp_path: Path) -> None:
    plain = run(digest, 2)
    assert len(plain) == 2 and plain[0] == plain[1]
    otherwise = dict(variable.split("=") for variable in OTHERWISE.split())
    assert digests(tmp_path / "rendezvous", **otherwise) == plain


def test_other_kernels_on_one_rank_leave_ranks_with_the_same_weights(
    tmp_path: Path,
) -> None:
    """Sums in another order are other bits, but each matrix is made once, at its
    home.
    """
    first, second = digests(tmp_path / "rendezvous", ATEN_CPU_CAPABILITY="default")
    assert first == second
