"""Ranks in processes that are no one's daemons: they save checkpoints, and may be killed.

``bench.ranks`` starts daemons, which may start no process, as Megatron's save does.
This module is one rank, with the arguments FUNCTION ARGUMENT RANK WORLD FOLDER GPUS SECONDS. It
writes the function's result to FOLDER, and its stack to stderr before its limit.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_muon.lab.accept.child import function_of
from megatron_muon.lab.accept.processes import environment

_GRACE = 2.0  # seconds for the others after the first rank has ended with an error
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank's end.

    Attributes:
        code: exit status, negative for a signal; None where it was killed with the others.
        value: what its function returned, as JSON gives it; None if it did not.
        error: its error in words, or empty.
    """

    code: int | None
    value: Any
    error: str


def run_apart(function: str, argument: Any, world: int, gpus: bool, seconds: float) -> list[Ended]:
    """Run ``function(argument)`` on ranks, each a process of its own.

    Args:
        function: ``module:function``.
        argument: any value of JSON.
        world: number of ranks.
        gpus: whether each has a GPU, with NCCL; else gloo and ``megatron_muon.cpu``.
        seconds: limit; the ranks that have not ended then are killed.
    """
    with tempfile.TemporaryDirectory(prefix="megatron_muon") as folder:
        module = [sys.executable, "-m", "megatron_muon.lab.accept.apart"]
        words = [function, json.dumps(argument)]
        processes = [
            subprocess.Popen(
                [*module, *words, str(rank), str(world), folder, str(int(gpus)), str(seconds)],
                env=_environment(world, gpus),
            )
            for rank in range(world)
        ]
        killed = _waited(processes, seconds)
        return [
            _ended(process, rank in killed, Path(folder, f"{rank}.json"))
            for rank, process in enumerate(processes)
        ]


def _environment(world: int, gpus: bool) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world)
    made = environment() | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": str(threads)}
    return made if gpus else made | {"GLOO_SOCKET_IFNAME": "lo"}


def _waited(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> set[int]:
    """Wait for all, a little for the rest after an error; returns the ranks killed here."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.returncode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(_POLL)
    late = {rank for rank, process in enumerate(processes) if process.poll() is None}
    for rank in late:
        processes[rank].kill()
    for process in processes:
        process.wait()
    return late


def _ended(process: subprocess.Popen[bytes], was_killed: bool, file: Path) -> Ended:
    given = json.loads(file.read_text()) if file.exists() else {}
    code = None if was_killed else process.returncode
    return Ended(code, given.get("value"), given.get("error", ""))


def main(argv: Sequence[str]) -> int:
    """Be one rank; 1 where the function raised an error."""
    function, argument, rank, world, folder, gpus, seconds = argv
    faulthandler.dump_traceback_later(0.9 * float(seconds))  # a hang says where
    try:
        made = {"value": _run(function, json.loads(argument), int(rank), int(world), folder, gpus)}
    except BaseException as error:  # torch's error of checkpoints is no Exception
        traceback.print_exc()
        made = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(made))
    return 1 if "error" in made else 0


def _run(function: str, argument: Any, rank: int, world: int, folder: str, gpus: str) -> Any:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    if gpus == "1":
        torch.cuda.set_device(rank)
    else:
        import megatron_muon.cpu

        megatron_muon.cpu.enable(allow_cuda=True)
    dist.init_process_group(
        "nccl" if gpus == "1" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )
    called: Any = function_of(function)
    return called(argument)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
