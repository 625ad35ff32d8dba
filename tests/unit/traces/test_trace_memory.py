"""A trace of 500 MB takes a bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT

MOST_MIB = 120
READS = """
import re, sys, time
from pathlib import Path
from megatron_muon.lab.traces.runs import run_times
def peak():  # not ru_maxrss, which begins with the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
begin = time.perf_counter()
(rank,) = run_times(Path(sys.argv[1]), "x").ranks
print(rank.kinds[0].count, before, peak(), round(time.perf_counter() - begin, 1))
"""


HOST = (
    '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": %d, "dur": 7.5, '
    '"args": {"External id": 12345, "Input Dims": [[4, 1024, 4096], [4096, 4096], [4096]]}},\n'
)
KERNEL = '{"ph": "X", "cat": "kernel", "name": "%s", "pid": 0, "tid": 7, "ts": %d, "dur": 7.5},\n'


def _write(path: Path, megabytes: int) -> int:
    """Write operators and kernels that do not touch; return the number of NCCL's among them."""
    collectives = at = 0
    with path.open("w") as out:
        out.write('{"schemaVersion": 1, "traceEvents": [\n')
        while out.tell() < megabytes * 10**6:
            for _ in range(1000):
                at += 10
                out.write(HOST % at + KERNEL % ("void gemm(x)", at))
            out.write(KERNEL % ("ncclDevKernel_AllReduce_Sum(x)", at))
            collectives += 1
        out.write('{"ph": "M", "name": "process_name", "pid": 0}]}')
    return collectives


def _peak(path: Path, megabytes: int) -> tuple[int, int]:
    """(MiB of the process before it reads the file, and its peak)."""
    collectives = _write(path, megabytes)
    command = [sys.executable, "-c", READS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    count, before, after, seconds = map(float, done.stdout.split())
    assert count == collectives
    print(f"{path.stat().st_size / 1e6:.0f} MB: {before:.0f} MiB, then {after:.0f}, {seconds} s")
    return int(before), int(after)


def test_a_large_trace_takes_a_small_part_of_its_size(tmp_path: Path) -> None:
    before, after = _peak(tmp_path / "t.json", 20)
    assert after - before < 10  # json.load takes 150


@pytest.mark.slow
def test_500_mb_are_read_in_bounded_memory(tmp_path: Path) -> None:
    _, after = _peak(tmp_path / "t.json", 500)
    assert after < MOST_MIB
