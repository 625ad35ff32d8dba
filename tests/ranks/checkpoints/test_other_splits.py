"""A checkpoint loads under another split: nothing of its state changes, and a line says
so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import sealing
from support.checkpoints.saving import RESHARDABLE
from support.installed import VERSION
from support.models.gpt import held, printed_by, start, take_step
from support.ranks import run, run_on
from support.runs.cases import Case, Topology
from support.runs.whole import differences, whole

BEFORE = Case(steps=2, gated=True, heads=12, groups=6)
HEADS = (("*.linear_qkv.*", "heads"), ("*.0.mlp.linear_fc1.*", "rows:120,400"))
AFTER = BEFORE.with_muon(splits=HEADS)


def _loaded(
    case: Case, topology: Topology, folder: str, format: str
) -> tuple[Any, Any, str]:
    """What a rank holds after the load and a step later, and what it prints as it
    loads.
    """
    built = start(case, topology)
    _, printed = printed_by(lambda: sealing.load(built, folder, format))
    before = held(built)
    take_step(built, case.steps)
    return before, held(built), printed


def test_a_run_resumes_with_another_split(tmp_path: Path) -> None:
    format = RESHARDABLE
    folder = str(tmp_path / "checkpoint")
    topology = Topology(2, 1, 2)
    saved = whole(run(sealing.saved, 4, BEFORE, topology, format, folder))
    alone = run_on(_loaded, AFTER, Topology(), folder, format)
    together = run(_loaded, 4, AFTER, replace(topology, tp=1, dp=4), folder, format)
    same = run(_loaded, 4, BEFORE, topology, folder, format)
    for results in (alone, together, same):
        assert differences(saved, whole([at_load for at_load, _, _ in results])) == []
    later = [
        whole([after for _, after, _ in results]) for results in (alone, together, same)
    ]
    assert differences(later[0], later[1]) == []
    changed = {
        text.split(":")[0].split(" ")[1] for text in differences(later[0], later[2])
    }
    assert len(changed) == 3, changed  # and no weight whose split is the same
    told = [printed.count("(--muon-split) is") for _, _, printed in together]
    assert told == [1, 0, 0, 0]
    assert not any("--muon-split" in printed for _, _, printed in same)


@pytest.mark.parametrize("mixer", ["mamba", "delta"])
def test_a_hybrid_resumes_at_another_tp_size(mixer: str, tmp_path: Path) -> None:
    """TP cuts its convolutions and vectors by marks that do not name a dim."""
    if mixer == "delta" and VERSION < (0, 16):
        pytest.skip("gated delta nets are since core 0.16")
    format = RESHARDABLE
    folder = str(tmp_path / "checkpoint")
    case = Case(steps=2, mixer=mixer, groups=6, vocab=144)
    saved = whole(run_on(sealing.saved, case, Topology(tp=2), format, folder))
    alone = run_on(_loaded, case, Topology(), folder, format)
    stages = run_on(_loaded, case, Topology(pp=2), folder, format)
    for results in (alone, stages):
        assert differences(saved, whole([at_load for at_load, _, _ in results])) == []
    later = [whole([after for _, after, _ in results]) for results in (alone, stages)]
    assert differences(*later) == []
