"""AdamW's fully_reshardable, which Megatron saves shifted where several buckets are padded."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_muon.megatron_lm import shifted
from support.checkpoints.inspecting import CASE, DP2, faults, saved
from support.checkpoints.saving import load, save
from support.installed import VERSION
from support.models.gpt import Case, Topology, start, take_step
from support.ranks import run

SHIFTED = (0, 15) <= VERSION < (0, 20)
ADAMW = replace(CASE, optimizer="adam")
SEVERAL = replace(DP2, overlap=True)  # buckets, all of them padded
ARGS = Namespace(
    **{"dist_ckpt_optim_fully_reshardable": True, "save": "folder", "no_save_optim": False},
    **{"finetune": False, "no_load_optim": False, "use_distributed_optimizer": True},
)
pytestmark = pytest.mark.skipif(VERSION < (0, 15), reason="the format came with core 0.15")


def _warned(topology: Topology, folder: str) -> tuple[str, str, str]:
    """What is printed at the start, at the save and after the load."""
    said = [io.StringIO() for _ in range(3)]
    built = start(ADAMW, topology)
    shifted.forget()
    with contextlib.redirect_stdout(said[0]):
        shifted.warn_at_start(ARGS, built.optimizer)
        shifted.warn_at_start(ARGS, built.optimizer)  # says no more
    for step in range(2):
        take_step(built, step)
    with contextlib.redirect_stdout(said[1]):
        shifted.warn_of_save(ARGS, built.optimizer)
    save(built, folder, "fully_reshardable")
    other = start(ADAMW, topology)
    load(other, folder, "fully_reshardable")
    with contextlib.redirect_stdout(said[2]):
        shifted.warn_of_loaded(ARGS, other.optimizer)
    at_start, at_save, at_load = (each.getvalue() for each in said)
    return at_start, at_save, at_load


@pytest.mark.parametrize("topology", [SEVERAL, DP2], ids=["several-buckets", "one"])
def test_a_run_of_adamw_is_told_at_its_start_at_a_save_and_at_a_load(
    topology: Topology, tmp_path: Path
) -> None:
    first, second = run(_warned, 2, topology, str(tmp_path))
    assert second == ("", "", "")
    wrong = SHIFTED and topology == SEVERAL
    for said in first:
        assert said.count("pull request 5077") == wrong
    if wrong:
        assert "--ddp-num-buckets 1" in first[0] == first[1] and "--no-load-optim" in first[2]


@pytest.mark.parametrize(
    ("case", "topology", "wrong"),
    [(ADAMW, SEVERAL, SHIFTED), (ADAMW, DP2, False), (CASE, SEVERAL, False)],
    ids=["adamw", "adamw-one-bucket", "muon"],
)
def test_inspect_sees_what_was_shifted(
    case: Case,
    topology: Topology,
    wrong: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path, "fully_reshardable", topology, case)
    said = faults(tmp_path, capsys)
    assert ("pull request 5077" in said) is wrong
    assert bool(said) is wrong
