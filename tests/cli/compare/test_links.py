"""Slow links between network namespaces: their rate, that nothing stays, where they cannot be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_muon.lab.bench.ranks import RankError, Task, run_ranks
from megatron_muon.lab.commands import main
from megatron_muon.lab.compare import links
from support import ROOT

WHY_NOT = links.why_not()
needs_links = pytest.mark.skipif(WHY_NOT is not None, reason=f"no slow links here: {WHY_NOT}")
SMALL = (
    "compare --steps 4 --hidden 64 --heads 4 --layers 2 --vocab 256 --seq 32 "
    "--global-batch-size 4 --topologies dp2"
).split()
MBITS, BYTES = 20.0, 1_000_000


def transfer(_: object) -> tuple[float, int]:
    """Seconds in which rank 1 has BYTES from rank 0, and bytes that left by this rank's link."""
    data = torch.zeros(BYTES, dtype=torch.uint8)
    dist.barrier()
    before, begin = links.bytes_sent(), time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(data, 1)
    else:
        dist.recv(data, 0)
    seconds = time.perf_counter() - begin
    dist.barrier()
    return seconds, links.bytes_sent() - before


def fail(_: object) -> None:
    """Rank 1 dies as one that the kernel kills, while the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def task(run: object, namespaces: tuple[str, ...]) -> Task:
    before = partial(links.enter, namespaces)
    return Task(run, None, len(namespaces), False, 1, 60.0, before)  # type: ignore[arg-type]


def held(numbers: set[int]) -> list[str]:
    """Which of the namespaces with these inode numbers a process is in, or holds open."""
    wanted = {f"net:[{number}]" for number in numbers}
    entries = []
    for pattern in ("[0-9]*/task/[0-9]*/ns/net", "[0-9]*/fd/*"):
        for path in Path("/proc").glob(pattern):
            try:
                if os.readlink(path) in wanted:
                    entries.append(str(path))
            except OSError:
                continue  # it has ended meanwhile
    return entries


def held_open(pid: int) -> set[int]:
    """Inode numbers of the namespaces that process ``pid`` holds open."""
    numbers = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = os.readlink(path)
        except OSError:
            continue  # it was closed meanwhile
        if name.startswith("net:["):
            numbers.add(int(name.removeprefix("net:[").removesuffix("]")))
    return numbers


def has_rank(numbers: set[int]) -> bool:
    """Whether a rank, which is forked from a server, is in one of the namespaces."""
    for path in held(numbers):
        try:
            if b"forkserver" in Path("/proc", Path(path).parts[2], "cmdline").read_bytes():
                return True
        except OSError:
            continue
    return False


def soon_gone(numbers: set[int]) -> bool:
    for _ in range(100):
        if not held(numbers):
            return True
        time.sleep(0.1)
    return False


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def numbers_of(paths: tuple[str, ...]) -> set[int]:
    return {os.stat(path).st_ino for path in paths}


# --- where they can be made -------------------------------------------------------------------


@needs_links
def test_a_transfer_takes_as_long_as_the_rate_says() -> None:
    """At least the bytes over the rate, but for the burst; without the rate it takes a tenth."""
    with links.shaped(2, MBITS) as namespaces:
        (_, sent), (seconds, back) = run_ranks(task(transfer, namespaces))
    at_least = 8 * (BYTES - links.burst(MBITS)) / (1e6 * MBITS)
    assert seconds >= 0.98 * at_least
    assert BYTES < sent < 1.2 * BYTES and back < 0.1 * BYTES
    with links.shaped(2, 100 * MBITS) as namespaces:
        times = [run_ranks(task(transfer, namespaces))[1][0] for _ in range(2)]
    assert min(times) < at_least


@needs_links
def test_nothing_is_left_and_the_host_keeps_its_interfaces() -> None:
    before = interfaces()
    with links.shaped(3, MBITS) as namespaces:
        numbers = numbers_of(namespaces)
        assert len(numbers) == 3 and len(held(numbers)) >= 3
        assert interfaces() == before
    assert soon_gone(numbers) and interfaces() == before
    assert links.bytes_sent() == 0  # this thread was never in one


@needs_links
def test_nothing_is_left_after_a_rank_that_is_killed() -> None:
    with pytest.raises(RankError, match="rank 1 died"), links.shaped(2, MBITS) as namespaces:
        numbers = numbers_of(namespaces)
        run_ranks(task(fail, namespaces))
    assert soon_gone(numbers)


@needs_links
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_command_that_is_ended(
    ending: signal.Signals, tmp_path: Path
) -> None:
    """Neither Ctrl-C nor a kill, which no handler sees, leaves a namespace behind."""
    words = [sys.executable, "-m", "megatron_muon", *SMALL, "--link-mbits", "50"]
    words += ["--steps", "100000", "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = subprocess.Popen(
        words,
        env=environment,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal
    )
    try:
        assert (
            command.stderr is not None and "training dp2-adamw-50mbit" in command.stderr.readline()
        )
        numbers: set[int] = set()
        for _ in range(1200):
            numbers = held_open(command.pid)
            if len(numbers) == 3 and has_rank(numbers):
                break
            time.sleep(0.1)
        assert has_rank(numbers)  # before, the command is deaf to Ctrl-C for a moment
        command.send_signal(ending)
        command.wait(60)
    finally:
        command.kill()
        command.communicate()
    assert soon_gone(numbers)


@needs_links
def test_a_comparison_over_a_slow_link_has_the_measured_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--link-mbits", "50", "--folder", str(tmp_path)]
    assert main(words) == 0
    (topology,) = json.loads((tmp_path / "report.json").read_text())["topologies"]
    (row,) = topology["slow_links"]["steps"]
    for name in ("adamw", "muon"):
        sent = row[name]["link_bytes"]
        assert sent > topology[name]["megatrons"] / 2  # of a rank, with headers
        assert row[name]["step_ms"] > 0.9 * 8e-3 * (sent - links.burst(50)) / 50
        assert topology[name]["link_bytes"] == 0
        assert row[name]["losses"] == topology[name]["losses"]
    assert len(topology["slow_links"]["measured"]) == 3
    page = (tmp_path / "report.md").read_text()
    assert "| dp2 | 50 | " in page and "A model, not a measurement" not in page
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    assert main([*words, "--link-mbits", "49"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["training dp2-adamw-49mbit", "training dp2-muon-49mbit"]


# --- where they cannot ------------------------------------------------------------------------

WITHOUT_RIGHTS = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in (12, 21):  # CAP_NET_ADMIN, CAP_SYS_ADMIN, out of the bounding set of what follows
    libc.prctl(24, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, "-m", "megatron_muon", *sys.argv[1:]])
"""
NO_RIGHTS = (
    "unshare of a network namespace: Operation not permitted (it takes root, or the "
    "capabilities CAP_SYS_ADMIN and CAP_NET_ADMIN)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("asked", [True, False])
def test_without_rights_the_command_says_so_and_models(asked: bool, tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_RIGHTS, *SMALL, "--folder", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        words + ["--link-mbits", "50"] * asked,
        env=environment, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    if asked:
        assert done.returncode == 2 and "training" not in done.stderr
        assert f"error: --link-mbits cannot be measured here: {NO_RIGHTS}" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        first = done.stderr.splitlines()[0]
        assert first == f"slow links are modelled, not measured: {NO_RIGHTS}"
        assert f"A model, not a measurement: {NO_RIGHTS}." in done.stdout


@pytest.mark.parametrize(
    ("missing", "says"),
    [("tc", "there is no program tc, which iproute2 has"), ("ip", "there is no program ip")],
)
def test_a_missing_program_is_named(
    missing: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == missing else name)
    reason = links.why_not()
    assert reason is not None and reason.startswith(says)


@needs_links
def test_a_command_of_iproute2_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEAST_BURST", -1)
    monkeypatch.setattr(links, "BURST_SECONDS", 0)
    reason = links.why_not()
    assert reason is not None and "qdisc add dev muon0 root tbf rate 100000000bit burst" in reason


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "fast"])
def test_a_rate_is_a_number_of_mbits(
    rate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--folder", str(tmp_path), "--link-mbits", rate])
    assert "argument --link-mbits: must be a number from 0.1 to 100000" in capsys.readouterr().err
