"""``bench speeds``: measures on ranks that it starts; prints the flags that homes follow from."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_muon.lab.commands import main
from support import ROOT
from support.megatron_lm.flag_parsers import config_of


def test_bench_speeds_prints_both_as_flags_of_a_run() -> None:
    line = "bench speeds --ranks 2 --threads 1 --rounds 2 --mib 1 --shape 64x128"
    done = subprocess.run(
        [sys.executable, "-m", "megatron_muon", *line.split()],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *said, flags = done.stdout.splitlines()
    config = config_of("0.12", *flags.split())
    assert flags.split()[::2] == ["--muon-rank-tflops", "--muon-link-gbytes"]
    assert f"{config.rank_tflops:.3g} (" in said[0] and "64x128, standard, 5 steps" in said[0]
    assert f"{config.link_gbytes:.3g} (" in said[1] and "gloo, 2 ranks" in said[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--ranks 0", "argument --ranks: must be a whole number of at least 1, got '0'"),
        ("--mib -1", "argument --mib: must be a whole number of at least 1, got '-1'"),
        ("--shape 64", "a shape is ROWSxCOLS, got '64'"),
        ("--muon-ns-steps 0", "ns_steps (--muon-ns-steps) must be at least 1, got 0"),
    ],
)
def test_bench_speeds_refuses_what_it_cannot_measure(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "speeds", *given.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
