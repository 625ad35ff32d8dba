"""A run that logs is bit for bit the run that does not; ``test_numbers`` holds it,
too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.gpt import Case, Topology, start, take_step, trained, truth
from support.ranks import error_of, run
from support.runs.watching import records, watched
from support.runs.whole import differences

BF16 = Case()
FP16 = replace(BF16, bf16=False, fp16=True, overflow=((1, "*.linear_fc1.weight"),))
RUNS = [
    (FP16, Topology(dp=2)),
    (
        replace(BF16, layers=4),
        Topology(pp=2, chunks=2, overlap=True, step_overlap=True),
    ),
    (replace(BF16, frozen=("embedding.*", "*.layers.0.*")), Topology(pp=2)),
]


@pytest.mark.parametrize(("case", "topology"), RUNS, ids=str)
def test_logging_changes_no_bit(case: Case, topology: Topology, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    logged = trained(watched(case, path), topology)
    assert differences(truth(case), logged) == []
    lines = records(path)
    taken = sum(not case.overflows(step) for step in range(case.steps))
    assert [line["kind"] for line in lines] == ["start", *["step"] * taken]


def _hooks(case: Case) -> list[Any]:
    built = start(case, Topology(tp=2))
    before = torch.get_rng_state()
    counts = [_forward_hooks(built.chunks)]
    for step in range(case.steps):
        take_step(built, step)
        counts.append(_forward_hooks(built.chunks))
    return [
        counts,
        built.optimizer.watch is None,
        bool((before == torch.get_rng_state()).all()),
    ]


def _forward_hooks(chunks: list[Any]) -> int:
    return sum(len(m._forward_hooks) for chunk in chunks for m in chunk.modules())


def test_hooks_are_in_the_model_before_a_logging_step_only(tmp_path: Path) -> None:
    case = replace(BF16, steps=6)
    for counts, off, _ in run(_hooks, 2, case):
        assert off and counts == [0] * 7
    for counts, off, same in run(_hooks, 2, watched(case, tmp_path / "lines", 3)):
        assert not off and same
        # two layers, the final norm, the logits; the first step's number is not known
        assert counts == [4, 0, 4, 0, 0, 4, 0]


def _log(path: str, stop: int) -> None:
    built = start(watched(replace(BF16, steps=stop), Path(path)), Topology(dp=2))
    for step in range(stop):
        take_step(built, step)


def test_a_second_run_appends_to_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    run(_log, 2, str(path), 1)
    with path.open("ab") as file:
        file.write(b'{"kind":"st')  # killed in the middle of a line
    run(_log, 2, str(path), 2)
    *lines, last = path.read_text().split("\n")
    assert last == "" and lines[2] == '{"kind":"st'
    kinds = [json.loads(line)["kind"] for line in lines if line != lines[2]]
    assert kinds == ["start", "step", "start", "step", "step"]


def _refused(path: str) -> str:
    return error_of(lambda: start(watched(BF16, Path(path)), Topology(dp=2)))


def test_a_file_that_cannot_be_written_stops_all_ranks_before_the_first_step(
    tmp_path: Path,
) -> None:
    other, writer = run(_refused, 2, str(tmp_path))  # a folder
    assert (
        writer.startswith("OSError: log_file (--muon-log-file)")
        and str(tmp_path) in writer
    )
    assert (
        other.startswith("RuntimeError: rank 1 stopped") and "--muon-log-file" in other
    )
