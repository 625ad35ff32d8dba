"""A rank whose environment differs from the others' changes no bit, or ends all with an error.

The processes are started here: an environment is read at a process's start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from support import PYTHON311, ROOT

RANK = """
import hashlib, json, sys
import megatron_muon

megatron_muon.cpu.enable(allow_cuda=True)
import torch.distributed as dist
from support.models.gpt import Case, Topology, start, take_step

rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
built = start(Case(gated=True), Topology(1, 1, 2, overlap=True))
for step in range(2):
    take_step(built, step)
bits = hashlib.sha256()
for chunk in built.chunks:
    for name, param in sorted(chunk.named_parameters()):
        bits.update(name.encode() + param.detach().float().numpy().tobytes())
print("DONE " + json.dumps(bits.hexdigest()))
"""
OTHERWISE = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",  # NVIDIA's containers set it
    "NVIDIA_TF32_OVERRIDE": "1",
    "OMP_NUM_THREADS": "3",
    "MKL_NUM_THREADS": "3",
    "PYTHONHASHSEED": "7",
    "LC_ALL": "C",
    "TZ": "Asia/Tokyo",
    "NCCL_DEBUG": "INFO",
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@cache
def digests(**of_rank_1: str) -> list[str]:
    """Of the weights of both ranks, after two steps; the second one has more in its environment."""
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(PYTHON311), *filter(None, sys.path)]
    )
    plain = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RANK]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(Path(folder, "rendezvous"))],
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
    lines = [line for out, _ in ended for line in out.splitlines() if line.startswith("DONE ")]
    return [json.loads(line.removeprefix("DONE ")) for line in lines]


def test_another_environment_on_one_rank_changes_no_bit() -> None:
    plain = digests()
    assert len(plain) == 2 and plain[0] == plain[1]
    assert digests(**OTHERWISE) == plain


def test_other_kernels_on_one_rank_leave_ranks_with_the_same_weights() -> None:
    """Sums in another order are other bits, but each matrix is made once, at its home."""
    first, second = digests(ATEN_CPU_CAPABILITY="default")
    assert first == second
