"""Starts ranks on this machine: one process each, no launcher, no port.

Ranks are forked from a server that has imported torch. They rendezvous through a file,
communicate over NCCL with GPUs and over gloo without, and end with this process.
"""

from __future__ import annotations

import datetime
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_muon.lab.outputs import CommandError

# With 1 ranks share GPUs, as hosts of their own to NCCL, which then sends through
# sockets: results are those of as many GPUs, times are not.
SHARED = "MEGATRON_MUON_SHARED_GPUS"
_GRACE = 1.0  # seconds to wait for other ranks' errors after the first failure
# What a rank imports to build a model and its optimizer: a second, spent once for all
# ranks.
_TO_BUILD = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "torch._dynamo",
    "megatron_muon.mcore.wiring.install",
)


class RankError(CommandError):
    """A rank raised, died or did not finish in time; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Task:
    """The function that every rank runs, and its setting."""

    # of an importable module; called once torch's world is up
    run: Callable[[Any], Any]
    argument: Any  # any picklable value, the same for every rank
    world: int  # number of ranks
    # whether each rank has a GPU, with NCCL; else megatron_muon.cpu and gloo
    gpus: bool
    threads: int  # number of torch's threads per rank
    seconds: float  # timeout of the measurement, and of each collective
    builds: bool = False  # models: without GPUs, what that imports is imported once


def gpus_for(world: int, asked_by: str, fewer: str) -> bool:
    """Whether ranks take a GPU each: they do if there is any; a ValueError if there are
    too few.

    ``asked_by`` and ``fewer`` are texts for it: flags that gave ``world``, flags for
    fewer ranks.
    """
    import torch

    gpus = torch.cuda.device_count()
    if 0 < gpus < world and os.environ.get(SHARED) != "1":
        raise ValueError(
            f"{asked_by} needs {world} GPUs (one per rank), but only {gpus} are "
            f"visible: choose fewer ranks with {fewer}, or set CUDA_VISIBLE_DEVICES= "
            "to measure the CPU"
        )
    return gpus > 0


def threads_for(world: int, asked: int | None) -> int:
    """Threads per rank: the given number, or a rank's share of the cores."""
    return asked or max(1, (os.cpu_count() or 1) // world)


def run_ranks(task: Task) -> list[Any]:
    """The result of ``task.run`` on each rank; a RankError, which ends all, if one
    fails.
    """
    context = _context(task)
    with (
        tempfile.TemporaryDirectory(prefix="megatron_muon") as folder,
        _nothing_as_main(),
    ):
        _wait_for_server(context)
        pipes, processes = [], []
        try:
            for rank in range(task.world):
                ours, theirs = multiprocessing.Pipe(duplex=False)
                arguments = (theirs, task, rank, str(Path(folder, "rendezvous")))
                # no daemon, which may start no process, as Megatron's save does
                process = context.Process(target=_work, args=arguments, daemon=False)
                with _ctrl_c_waits():  # else the server starts a rank that nobody ends
                    process.start()
                    processes.append(process)
                theirs.close()
                pipes.append(ours)
            return _collect(pipes, processes, task.seconds)
        finally:
            for process in processes:
                process.join(_GRACE if sys.exc_info()[0] is None else 0)
                _end_group(process.pid)
                process.kill()
                process.join()


def _wait_for_server(context: Any) -> None:
    """Wait until the fork server has imported what ranks need; Ctrl-C ends it at once.

    It starts a process only then, here one that does nothing.
    """
    first = context.Process(target=gc.freeze)
    try:
        first.start()
        first.join()
    except KeyboardInterrupt:
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, signal.SIGKILL)  # it is deaf to Ctrl-C
        raise


def _collect(
    pipes: Sequence[connection.Connection], processes: Sequence[Any], seconds: float
) -> list[Any]:
    deadline = time.monotonic() + seconds
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    values: dict[int, Any] = {}
    errors: list[str] = []
    while waiting and time.monotonic() < deadline:
        left = max(0.0, deadline - time.monotonic())
        for pipe in connection.wait(list(waiting), left):
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                error, values[rank] = pipe.recv()
                if error is not None:
                    errors.append(f"rank {rank} of {len(pipes)} failed:\n{error}")
            except EOFError:
                processes[rank].join(_GRACE)
                code = processes[rank].exitcode
                why = "-9: killed, for instance by the kernel when memory ran out"
                errors.insert(0, f"rank {rank} died, exit code {code} ({why})")
            if errors:
                deadline = min(deadline, time.monotonic() + _GRACE)
    if errors:
        raise RankError(errors[0])
    if waiting:
        late = sorted(waiting.values())
        raise RankError(
            f"rank(s) {late} of {len(pipes)} did not finish in {seconds:g} s"
        )
    return [values[rank] for rank in range(len(pipes))]


def _work(pipe: connection.Connection, task: Task, rank: int, rendezvous: str) -> None:
    """Run a rank's process, and send its result or error."""
    os.setpgid(0, 0)  # what the rank starts, as Megatron's save does, ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send((None, _run(task, rank, rendezvous)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    pipe.close()


def _end_with_parent() -> None:
    """End this process when the one that started it has ended, even if a collective
    hangs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _end_group(leader: int) -> None:
    """End a rank and what it has started, also where the rank has ended or was
    killed.
    """
    with suppress(ProcessLookupError):  # nothing is left, or the rank has no group yet
        os.killpg(leader, signal.SIGKILL)


def _run(task: Task, rank: int, rendezvous: str) -> Any:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_RANK": str(rank),
    }
    torch.set_num_threads(task.threads)
    if task.gpus:
        gpus = torch.cuda.device_count()
        if task.world > gpus:  # NCCL refuses two ranks of one host on one GPU
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(rank % gpus)
    else:
        import megatron_muon.cpu

        megatron_muon.cpu.enable(allow_cuda=True, late="megatron.core" in sys.modules)
    dist.init_process_group(
        "nccl" if task.gpus else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=task.world,
        timeout=datetime.timedelta(seconds=task.seconds),
    )
    value = task.run(task.argument)
    dist.destroy_process_group()
    return value


def _context(task: Task) -> Any:
    """The fork server's context; it has one thread, since an OpenMP pool does not
    survive forks.
    """
    with patch.dict(os.environ):
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            # Megatron's, where the server imports it
            "PYTHONWARNINGS": "ignore",
            # Megatron asks every launcher for it
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        # the profiler writes a line at each start
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        if not task.gpus:
            # else gloo resolves the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = multiprocessing.get_context("forkserver")
        first = ["torch"] if task.gpus else ["megatron_muon.cpu.on"]
        if task.builds and not task.gpus:
            first += _TO_BUILD
        context.set_forkserver_preload([*first, "megatron_muon.lab.frozen"])
        # A terminal sends SIGINT to ranks, too, and each would print a traceback. They
        # inherit that it does nothing; this process ends them.
        with _ctrl_c_does(signal.SIG_IGN):
            forkserver.ensure_running()
    return context


@contextmanager
def _ctrl_c_does(what: Any) -> Iterator[None]:
    """A context in which SIGINT has this handler; only the main thread may set one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, what)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """A SIGINT that comes within it interrupts at its end."""
    came: list[int] = []
    with _ctrl_c_does(lambda number, frame: came.append(number)):
        yield
    if came:
        raise KeyboardInterrupt


@contextmanager
def _nothing_as_main() -> Iterator[None]:
    """Keep multiprocessing from importing this process's script in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
