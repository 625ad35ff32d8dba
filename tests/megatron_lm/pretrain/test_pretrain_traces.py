"""``--muon-trace-steps`` in the real ``pretrain_gpt.py``: needs a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon.lab.trace.rank_trace import RankTrace
from support.megatron_lm.scripts import MUON, losses, needs_checkout, pretrain

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
ADAM = "--optimizer adam --use-distributed-optimizer"


@pytest.mark.parametrize("optimizer", [MUON, ADAM], ids=["muon", "adam"])
def test_any_optimizer_is_traced_and_trains_the_same(optimizer: str, tmp_path: Path) -> None:
    plain = pretrain(2, optimizer, "--bf16")
    flags = f"--muon-trace-steps 3:4 --muon-trace-dir {tmp_path / 'traces'}"
    traced = pretrain(2, optimizer, "--bf16", flags)
    assert losses(traced) == losses(plain) and len(losses(plain)) >= 6
    traces = [RankTrace(tmp_path / "traces" / f"rank{rank}.json.gz") for rank in (0, 1)]
    assert [len(trace.steps) for trace in traces] == [2, 2]
    gathered = {call.place for trace in traces for call in trace.calls}
    assert {"grads/reduce", "params/gather"} <= gathered
    assert ({"muon/gather", "muon/scatter"} <= gathered) == (optimizer is MUON)


def test_steps_beyond_the_run_are_refused(tmp_path: Path) -> None:
    flags = f"--muon-trace-steps 6:7 --muon-trace-dir {tmp_path}"
    text = pretrain(1, MUON, "--bf16", flags, fails=True)
    assert "--muon-trace-steps 6:7: the run has --train-iters 6" in text
    assert losses(text) == []
