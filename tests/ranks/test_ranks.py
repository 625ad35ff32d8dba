"""The multi-rank harness: values, failures, time limits, and reuse."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support import ROOT, TESTS
from support.ranks import RankError, run


def _sum_of_ranks(scale: float) -> tuple[int, float, int]:
    t = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(t)
    return dist.get_rank(), t.sum().item(), os.getpid()


def _one_fails(bad: int) -> None:
    if dist.get_rank() == bad:
        raise ValueError("the reason is here")
    dist.barrier()


def _one_dies(bad: int) -> None:
    if dist.get_rank() == bad:
        os._exit(3)
    dist.barrier()


def _one_sleeps(slow: int) -> None:
    if dist.get_rank() == slow:
        time.sleep(60)


def _threads() -> int:
    return torch.get_num_threads()


def test_every_rank_returns_and_collectives_are_real() -> None:
    values = run(_sum_of_ranks, 3, 2.0)
    assert [v[0] for v in values] == [0, 1, 2]
    assert {v[1] for v in values} == {3 * 2.0 * 6}
    assert len({v[2] for v in values} | {os.getpid()}) == 4


def test_workers_are_reused() -> None:
    first = run(_sum_of_ranks, 2, 1.0)
    second = run(_sum_of_ranks, 2, 1.0)
    assert {v[2] for v in first} & {v[2] for v in second}


def test_failing_rank_is_named_with_its_traceback_and_the_pool_recovers() -> None:
    with pytest.raises(RankError) as caught:
        run(_one_fails, 3, 1, timeout=30)
    text = str(caught.value)
    assert "_one_fails: rank 1 of 3 failed" in text
    assert "ValueError: the reason is here" in text and "in _one_fails" in text
    assert run(_sum_of_ranks, 2, 1.0)[0][1] == 9.0


def test_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 2 of 3 died:\nthe process ended with exit code 3"):
        run(_one_dies, 3, 2, timeout=30)


def test_timeout_names_the_rank_and_shows_its_stack() -> None:
    run(_threads, 2)  # so that the workers are started and only the task itself is timed
    with pytest.raises(RankError) as caught:
        run(_one_sleeps, 2, 1, timeout=4.0)
    assert "rank(s) [1] of 2 did not finish in 4 s" in str(caught.value)
    assert "in _one_sleeps" in str(caught.value)


def test_threads_are_set() -> None:
    assert run(_threads, 1, threads=2) == [2]
    assert run(_threads, 1) == [1]


def _says_pid_and_sleeps(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def _alive(pid: int) -> bool:
    try:  # a zombie that init has not collected yet is gone for our purpose
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter between opening and reading
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="uses /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_tests_even_when_killed(how: signal.Signals, tmp_path: Path) -> None:
    code = (  # a suite started in the background has SIGINT ignored, and its children inherit that
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from test_ranks import _says_pid_and_sleeps as f; "
        "from support.ranks import run; run(f, 2, {!r})"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code.format(str(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([here, str(TESTS), str(ROOT)])},
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 200  # a loaded machine imports slowly
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert len(pids) == 2 and all(map(_alive, pids))
    process.send_signal(how)
    process.wait(20)
    end = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_alive, pids))
