"""examples/minimal.py runs as it stands, and saves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.processes import python

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()


@pytest.mark.parametrize("start", [[], TORCHRUN], ids=["one process", "two"])
def test_the_loss_falls(start: list[str], tmp_path: Path) -> None:
    done = python(*start, "examples/minimal.py", str(tmp_path / "saved"))
    assert done.returncode == 0, done.stderr[-4000:]
    text = done.stdout
    losses = [
        float(value) for value in re.findall(r"^step \d+: loss (\S+)$", text, re.M)
    ]
    assert len(losses) == 4, text
    assert losses[-1] < 0.85 * losses[0]  # 3.9 after 5.2 when it was written
    assert (tmp_path / "saved" / "megatron_muon.json").exists()
    assert f"The checkpoint is in {tmp_path / 'saved'}" in text
    assert "loss of 5.545; below 4.5" in text and losses[-1] < 4.5
    assert "Warning" not in done.stderr and ".grad attribute" not in done.stderr


def test_a_package_that_megatron_lacks_is_one_line() -> None:
    code = (
        "import importlib.util as u, runpy; f = u.find_spec; u.find_spec = lambda n: "
        "None if n == 'psutil' else f(n); runpy.run_path('examples/minimal.py')"
    )
    done = python("-c", code)
    assert done.returncode == 1
    assert done.stderr == "Megatron needs more packages: pip install psutil\n"
