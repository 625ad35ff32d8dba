"""``--muon-trace-steps`` and ``--muon-trace-dir``: what is checked before anything is
built.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_muon.megatron_lm.loop import check_traces


def _args(folder: Path, **given: object) -> Namespace:
    return Namespace(
        **{"muon_trace_steps": "2:3", "muon_trace_dir": str(folder / "t"), **given}
    )


def test_a_namespace_may_be_checked_twice(tmp_path: Path) -> None:
    check_traces(_args(tmp_path, train_iters=3))
    check_traces(_args(tmp_path, train_iters=None))
    assert (tmp_path / "t").is_dir()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"muon_trace_steps": "3:2"},
            "--muon-trace-steps 3:2: steps to trace must be FIRST:LAST",
        ),
        (
            {"muon_trace_steps": None},
            "--muon-trace-dir has no effect without --muon-trace-steps",
        ),
        ({"train_iters": 2}, "--muon-trace-steps 2:3: the run has --train-iters 2"),
        (
            {"use_pytorch_profiler": True},
            "and --use-pytorch-profiler both start torch's profiler",
        ),
    ],
)
def test_errors_come_before_the_run(
    given: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        check_traces(_args(tmp_path, **given))


def test_a_restart_is_not_refused_for_the_traces_of_an_earlier_run(
    tmp_path: Path,
) -> None:
    """At which step it starts is known only after the load."""
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "rank0.json.gz").touch()
    check_traces(_args(tmp_path))
