"""examples/minimal.py runs as it stands."""

from __future__ import annotations

import re

import pytest

from support.processes import printed

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("start", [[], TORCHRUN], ids=["one process", "two"])
def test_the_loss_falls(start: list[str]) -> None:
    text = printed(*start, "examples/minimal.py")
    losses = [float(value) for value in re.findall(r"^step \d+: loss (\S+)$", text, re.M)]
    assert len(losses) == 4, text
    assert losses[-1] < 0.85 * losses[0]  # 3.9 after 5.2 when it was written
