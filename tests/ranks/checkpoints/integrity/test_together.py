"""What fails on one rank ends on all of them, whatever it is."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.runtime.consensus import by_rank_0, together
from support.checkpoints.saving import formats
from support.checkpoints.sealing import saved
from support.models.gpt import Case, on_ranks
from support.ranks import error_of, run
from support.runs.topologies import DP2, TP2

CASE = Case(steps=1)
FORMAT = formats()[0]


def _nested() -> None:
    json.loads("[" * 200_000)


def _lookup() -> None:
    {}["a key"]


def _nothing_said() -> None:
    raise AssertionError


def _damaged_checkpoint() -> None:
    import tempfile

    from torch.distributed.checkpoint import FileSystemReader, load

    load(
        {"key": torch.zeros(1)},
        storage_reader=FileSystemReader(tempfile.mkdtemp()),
        no_dist=True,
    )


FAULTS = {
    "RecursionError": _nested,
    "KeyError": _lookup,
    "AssertionError": _nothing_said,
    "CheckpointException": _damaged_checkpoint,
}


def _one_fails(kind: str, failing: int) -> str:
    act = FAULTS[kind] if dist.get_rank() == failing else lambda: None
    return error_of(lambda: together(act, None, torch.device("cpu")))


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("failing", [0, 1])
def test_any_type_of_error(kind: str, failing: int) -> None:
    errors = run(_one_fails, 2, kind, failing, timeout=30.0)
    assert errors[failing].startswith(f"{kind}:")
    other = errors[1 - failing]
    assert (
        other.startswith(f"RuntimeError: rank {failing} stopped this run: ")
        and other[45:]
    )


def _nobody_else_votes() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        return "no vote"
    return error_of(lambda: together(_lookup, group, torch.device("cpu")))


def test_an_error_is_not_lost_where_others_do_not_answer() -> None:
    assert run(_nobody_else_votes, 2, timeout=30.0) == ["KeyError: 'a key'", "no vote"]


def _act_that_communicates() -> str:
    return error_of(lambda: together(dist.barrier, None, torch.device("cpu")))


def test_every_test_on_ranks_holds_acts_to_not_communicating() -> None:
    for text in run(_act_that_communicates, 2, timeout=30.0):
        assert "communicates: barrier" in text, text


def _rank_0_fails(kind: str) -> str:
    return error_of(lambda: by_rank_0(FAULTS[kind]))


@pytest.mark.parametrize("kind", FAULTS)
def test_what_rank_0_does_for_all(kind: str) -> None:
    """In Megatron-LM's load."""
    zero, one = run(_rank_0_fails, 2, kind, timeout=30.0)
    assert zero.startswith(f"{kind}:")
    assert one.startswith("RuntimeError: rank 0 stopped this run: ")


# --- saving ---------------------------------------------------------------------------


def _error_of_save(format: str, folder: Path) -> str:
    return error_of(lambda: saved(CASE, TP2, format, folder))


@pytest.mark.parametrize("format", [FORMAT, "torch"])
def test_the_digest_cannot_be_written(format: str, tmp_path: Path) -> None:
    """A folder is in its place, from before the save."""
    (tmp_path / manifest.FILE_NAME).mkdir()
    zero, one = run(_error_of_save, 2, format, tmp_path, timeout=60.0)
    assert "OSError" in zero or "IsADirectoryError" in zero
    assert "rank 0 stopped this run" in one


# --- loading --------------------------------------------------------------------------


def _of_another_model_on_rank_1(folder: Path) -> str:
    from support.checkpoints import sealing
    from support.models.gpt import start

    built = start(CASE, TP2)
    if dist.get_rank():
        for part in built.parts:
            part.matrices = {**part.matrices, "more.weight": {"2 x 2": 1}}
    return error_of(lambda: sealing.load(built, folder, FORMAT))


def test_a_check_that_fails_on_one_rank(tmp_path: Path) -> None:
    on_ranks(saved, CASE, TP2, FORMAT, tmp_path)
    zero, one = run(_of_another_model_on_rank_1, 2, tmp_path, timeout=60.0)
    assert "nothing in more.weight and has 1 of 2 x 2 in this run" in one
    assert "rank 1 stopped this run" in zero


# --- building -------------------------------------------------------------------------


def _refused_on_one_rank(case: Case) -> str:
    """The model's configuration is another on rank 1, as a stage's may be."""
    from megatron.core.utils import get_model_config

    from support.models.gpt import build, error_of_optimizer

    built = build(case, DP2)
    if dist.get_rank() == 1:
        get_model_config(built.chunks[0]).fp4_param = True
    return error_of_optimizer(built)


def test_what_is_refused_on_one_rank() -> None:
    zero, one = run(_refused_on_one_rank, 2, replace(CASE), timeout=60.0)
    assert "does not support fp4_param yet" in one
    assert "rank 1 stopped this run" in zero
