"""The file of a run's numbers."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.watching.record import Lines
from megatron_muon.mcore.watching.watch import _of_run


def test_a_disk_that_is_full_for_a_moment_costs_one_line(tmp_path: Path) -> None:
    """A limit of the file's size has the system write a part, as a full disk does."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = Lines(str(tmp_path / "lines"))
    lines.append({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(OSError, match="no space"):
            lines.append({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    lines.append({"step": 3})
    kept = (tmp_path / "lines").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 3]


@pytest.mark.parametrize(
    "others",
    [
        [{"default_config": False}, {"default_config": True}],
        [{"muon_lr_mult": 2.0}, {"is_decoupled_lr": True}, {"is_decoupled_lr": False}],
        [{"default_config": False}],  # a stage with embeddings alone
    ],
)
def test_the_rate_is_that_of_groups_without_one_of_their_own(others: list[Any]) -> None:
    assert _of_run(others) is others[-1]
