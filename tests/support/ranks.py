"""Run a function on several real gloo ranks, in worker processes that all tests share.

``run(fn, world_size, *args)`` calls the top-level function ``fn(*args)`` on ranks
0..n-1, each in its own process with ``torch.distributed`` initialised (gloo, rendezvous
through a file) and ``megatron_muon.cpu`` enabled, and returns the n return values.
Inside ``fn``, ``torch.distributed.get_rank()`` says which rank it is. Afterwards
Megatron's global state is reset.

Workers are forked from a server that has torch and Megatron imported, kept for the next
call, and replaced when a call fails or has left threads behind. They end with the
interpreter.
"""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver, managers
from typing import Any

import psutil

HERE = os.path.dirname(os.path.abspath(__file__))
MOST_THREADS = (
    60  # of a worker that is used again; what keeps more alive is left behind
)
FULL = b"full"
# seconds after the first failure in which other ranks' reports are still collected
GRACE = 0.3
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
CPU = ("support.te_on_cpu.on", "megatron_muon.cpu.on")  # in this order, before Megatron
PRELOAD = [
    "typing_override",
    "torch",
    "torch.distributed",
    *CPU,
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    WRITER,
    "torch._dynamo",  # the first optimizer that is made imports it
    "megatron_muon.mcore.wiring.install",
    "pytest",  # these are imported with the module of a rank's function
    "hypothesis",
    "support.models.gpt",
    "support.runs.whole",
    "support.frozen",
]


class RankError(AssertionError):
    """A rank raised, died or did not finish; the text names it and shows its
    traceback.
    """


@dataclass(frozen=True)
class Task:
    """What one rank is to do."""

    fn: bytes
    rank: int
    world_size: int
    rendezvous: str
    timeout: float
    sys_path: list[str]
    cwd: str


@dataclass(frozen=True)
class Report:
    """What came back: ``kind`` is 'ok' (value pickled), 'error' (traceback) or 'died'
    (why).
    """

    rank: int
    kind: str
    value: Any
    at: float


# ---------------------------------------------------------------- in the worker


def _free_models() -> None:
    """Take Megatron's DDP apart, and with it the process groups that it holds, 50
    threads a call.

    It hangs hooks of its own on its parameters' AccumulateGrad nodes, which it keeps: a
    cycle through C++ that gc cannot see.
    """
    for module in [
        o for o in gc.get_objects() if type(o).__name__ == "DistributedDataParallel"
    ]:
        for node in module.grad_accs:
            node.register_hook(
                lambda *_: None
            ).hooks_dict_ref().clear()  # all hooks share one
    gc.collect()


def _reset_megatron() -> None:
    """Forget Megatron's process-wide state, where Megatron is imported."""
    _free_models()
    for name, calls in (
        ("megatron.core.parallel_state", ("destroy_model_parallel",)),
        (
            "megatron.core.num_microbatches_calculator",
            ("unset_num_microbatches_calculator",),
        ),
        ("megatron.core.rerun_state_machine", ("destroy_rerun_state_machine",)),
        ("megatron_muon.mcore.checkpoint.seal", ("seal_from_now_on",)),
        # else some ranks keep hooks
        ("megatron_muon.mcore.wiring.install", ("uninstall",)),
    ):
        for call in calls:
            getattr(sys.modules.get(name), call, lambda: None)()
    tracker = sys.modules.get("megatron.core.tensor_parallel.random")
    if tracker is not None:
        tracker._CUDA_RNG_STATE_TRACKER = None
        tracker._CUDA_RNG_STATE_TRACKER_INITIALIZED = False


def _call(task: Task) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = task.sys_path
    os.chdir(task.cwd)
    torch.set_num_threads(int(os.environ.get("MEGATRON_MUON_THREADS", "1")))
    random.seed(0)
    torch.manual_seed(0)
    os.environ |= {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world_size),
        "LOCAL_RANK": "0",
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world_size,
        # the parent's limit comes first
        timeout=datetime.timedelta(seconds=task.timeout + 60),
    )
    fn, args = pickle.loads(task.fn)
    return fn(*args)


def _end() -> None:
    """End this process and those it started (saving a Megatron checkpoint starts
    one).
    """
    os.killpg(0, signal.SIGKILL)


def _end_with_parent() -> None:
    """End when the tests' process is gone, also in the middle of a hanging
    collective.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end()


def _fork_writers(pipe: connection.Connection) -> None:
    """Fork the process that collects what checkpoints' writers return.

    Before core 0.18 Megatron starts it anew on each rank, and it imports torch: 5 s of
    a processor.
    """

    @functools.cache
    def queue() -> Any:
        manager = managers.SyncManager(ctx=multiprocessing.get_context("fork"))
        # else the parent would not see that the rank has died
        manager.start(pipe.close)
        return manager.Queue()

    writer = importlib.import_module(WRITER)
    if hasattr(writer, "_get_write_results_queue"):
        writer._get_write_results_queue = queue


def _work(pipe: connection.Connection, stacks: str) -> None:
    """The worker's loop: a task, its report, and (after an 'ok' of all ranks) the
    clean-up.
    """
    os.setpgid(0, 0)  # for _end(); Ctrl-C in the terminal then reaches the parent only
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stack_file = open(stacks, "w")  # faulthandler writes into it while we live
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    import torch.distributed as dist

    for name in CPU:  # a no-op if the fork server has done it
        importlib.import_module(name)

    _fork_writers(pipe)
    importlib.import_module("support.acts").hold_acts()
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            _end()
        try:
            report = Report(
                task.rank, "ok", pickle.dumps(_call(task)), time.monotonic()
            )
        except BaseException:
            report = Report(
                task.rank, "error", traceback.format_exc(), time.monotonic()
            )
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pipe.send_bytes(pickle.dumps(report))
            # all ranks are done; after an error we are killed here instead
            pipe.recv_bytes()
        except (EOFError, OSError):
            _end()
        try:
            dist.destroy_process_group()
            _reset_megatron()
            pipe.send_bytes(
                FULL if psutil.Process().num_threads() > MOST_THREADS else b""
            )
        except BaseException:
            pipe.send_bytes(traceback.format_exc().encode())


# ---------------------------------------------------------------- in the parent


class _Worker:
    def __init__(self, folder: str, number: int) -> None:
        self.stacks = os.path.join(folder, f"stacks{number}")
        self.pipe, theirs = multiprocessing.Pipe()
        # not a daemon: those may not have children, and saving a checkpoint starts one
        self.process = _context().Process(
            target=_work, args=(theirs, self.stacks), daemon=False
        )
        self.process.start()
        theirs.close()

    def stack(self, seconds: float = 2.0) -> str:
        """What the worker is doing, by faulthandler."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        end, text, before = time.monotonic() + seconds, "", None
        while time.monotonic() < end and (not text or text != before):
            time.sleep(0.05)
            before, text = text, open(self.stacks).read()
        return text or "(no stack came)"

    def kill(self) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):  # it is gone, or has no group yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class _Pool:
    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks")
        self.idle: list[_Worker] = []
        self.numbers = itertools.count()

    def take(self, count: int) -> list[_Worker]:
        with _nothing_as_main():
            while len(self.idle) < count:
                self.idle.append(_Worker(self.folder, next(self.numbers)))
        start = len(self.idle) - count  # those used last are warm
        taken, self.idle = self.idle[start:], self.idle[:start]
        return taken

    def close(self) -> None:
        for worker in self.idle:
            worker.kill()
        self.idle.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


class _nothing_as_main:
    """Keep multiprocessing from importing the parent's ``__main__`` (pytest) in every
    worker.
    """

    def __enter__(self) -> None:
        self.main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")

    def __exit__(self, *exc: object) -> None:
        sys.modules["__main__"] = self.main


@functools.cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool


@functools.cache
def _context() -> Any:
    """The fork server's context; the server has torch and Megatron imported, on one
    thread.
    """
    before = dict(os.environ)
    # an OpenMP thread pool would not survive the fork
    os.environ["OMP_NUM_THREADS"] = "1"
    # else gloo resolves the host name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # what Megatron asks of every launcher
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    # 3.11 sends none
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    try:
        server = multiprocessing.get_context("forkserver")
        # a command's ranks may have started one, with less
        forkserver._forkserver._stop()
        server.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return server


def _collect(
    workers: list[_Worker], deadline: float, grace: float
) -> dict[int, Report]:
    """Reports by rank: all, or those up to ``grace`` after the first failure, or in
    time.
    """
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    reports: dict[int, Report] = {}
    while waiting and time.monotonic() < deadline:
        for pipe in connection.wait(
            list(waiting), max(0.0, deadline - time.monotonic())
        ):
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                process = workers[rank].process
                process.join(5)
                why = f"the process ended with exit code {process.exitcode}"
                # before what it caused in others
                reports[rank] = Report(rank, "died", why, 0.0)
            if reports[rank].kind != "ok":
                deadline = min(deadline, time.monotonic() + grace)
    return reports


def _failure(
    workers: list[_Worker], reports: dict[int, Report], fn: str, limit: float
) -> str:
    failed = sorted((r for r in reports.values() if r.kind != "ok"), key=lambda r: r.at)
    size = len(workers)
    if failed:
        first, *others = failed
        text = f"{fn}: rank {first.rank} of {size} {_VERB[first.kind]}:\n{first.value}"
        for other in others:
            text += (
                f"\nrank {other.rank} then {_VERB[other.kind]}: "
                f"{_last_line(other.value)}"
            )
        return text
    late = [rank for rank in range(size) if rank not in reports]
    text = f"{fn}: rank(s) {late} of {size} did not finish in {limit:g} s"
    for rank in late:
        text += (
            f"\n--- rank {rank} is at (innermost call first)\n{workers[rank].stack()}"
        )
    return text


_VERB = {"error": "failed", "died": "died"}


def _last_line(text: str) -> str:
    return text.strip().rsplit("\n", 1)[-1]


def _clean_up(workers: list[_Worker], fn: str, limit: float = 30.0) -> list[_Worker]:
    """Have all ranks leave the process group, now that none of them needs it any more.

    Returns:
        The workers that can be used again; the others are ended.
    """
    usable = []
    for worker in workers:
        worker.pipe.send_bytes(b"all done")
    for rank, worker in enumerate(workers):
        try:
            late = not worker.pipe.poll(limit)
            text = worker.stack() if late else worker.pipe.recv_bytes().decode()
        except (EOFError, OSError):
            text = f"the process ended with exit code {worker.process.exitcode}"
        if text == FULL.decode():
            worker.kill()
        elif not text:
            usable.append(worker)
        else:
            raise RankError(
                f"{fn}: rank {rank} of {len(workers)} failed to clean up:\n{text}"
            )
    return usable


def error_of(call: Callable[[], object]) -> str:
    """The type and the text of what a call raises, or ``no error``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        call()
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        return f"{type(error).__name__}: {error}"
    return "no error"


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    grace: float = GRACE,
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks and return their values in rank
    order.

    RankError has the traceback of a rank that raised or died, or the stack of one that
    did not finish in ``timeout`` seconds; other ranks may report for ``grace`` seconds,
    and are killed.
    """
    if fn.__module__ == "__main__":
        raise ValueError(
            f"{fn.__name__} is in __main__, which workers do not import: use a module"
        )
    pool = _pool()
    workers = pool.take(world_size)
    rendezvous = os.path.join(pool.folder, f"rendezvous{next(pool.numbers)}")
    payload = pickle.dumps((fn, args))
    usable: list[_Worker] | None = None
    try:
        for rank, worker in enumerate(workers):
            task = Task(
                payload, rank, world_size, rendezvous, timeout, sys.path[:], os.getcwd()
            )
            worker.pipe.send_bytes(pickle.dumps(task))
        reports = _collect(workers, time.monotonic() + timeout, grace)
        if len(reports) < world_size or any(r.kind != "ok" for r in reports.values()):
            raise RankError(_failure(workers, reports, fn.__qualname__, timeout))
        usable = _clean_up(workers, fn.__qualname__)
        return [pickle.loads(reports[rank].value) for rank in range(world_size)]
    finally:
        if usable is not None:
            pool.idle += usable
        else:
            for worker in workers:
                worker.kill()
