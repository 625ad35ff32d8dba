"""``bench speeds``: measures on ranks that it starts; prints the flags that homes follow from."""

from __future__ import annotations

from support.benching import command
from support.megatron_lm.flag_parsers import config_of


def test_bench_speeds_prints_both_as_flags_of_a_run() -> None:
    done = command("bench speeds --ranks 2 --shape 64x128")
    assert done.returncode == 0, done.stderr
    *said, flags = done.stdout.splitlines()
    config = config_of("0.12", *flags.split())
    assert flags.split()[::2] == ["--muon-rank-tflops", "--muon-link-gbytes"]
    assert f"{config.rank_tflops:.3g} (" in said[0] and "64x128, standard, 5 steps" in said[0]
    assert f"{config.link_gbytes:.3g} (" in said[1] and "gloo, 2 ranks" in said[1]
