"""A checkpoint loads under another split: nothing of its state changes, and a line says
so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import sealing
from support.checkpoints.saving import formats
from support.installed import VERSION
from support.models.gpt import held, on_ranks, printed_by, start, take_step
from support.ranks import run
from support.runs.cases import Case, Topology
from support.runs.topologies import ONE, PP2, TP2, TP2_DP2
from support.runs.whole import differences, whole

BEFORE = Case(steps=2, gated=True, heads=12, groups=6)
HEADS = (("*.linear_qkv.*", "heads"), ("*.0.mlp.linear_fc1.*", "rows:120,400"))
AFTER = BEFORE.with_muon(splits=HEADS)


def _loaded(
    case: Case, topology: Topology, folder: Path, format: str
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
    format = next(each for each in formats() if each.startswith("fully"))
    folder = tmp_path / "checkpoint"
    saved = whole(on_ranks(sealing.saved, BEFORE, TP2_DP2, format, folder))
    alone = on_ranks(_loaded, AFTER, ONE, folder, format)
    together = run(_loaded, 4, AFTER, replace(TP2_DP2, tp=1, dp=4), folder, format)
    same = on_ranks(_loaded, BEFORE, TP2_DP2, folder, format)
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
    format = next(each for each in formats() if each.startswith("fully"))
    folder = tmp_path / "checkpoint"
    case = Case(steps=2, mixer=mixer, groups=6, vocab=144)
    saved = whole(on_ranks(sealing.saved, case, TP2, format, folder))
    alone = on_ranks(_loaded, case, ONE, folder, format)
    stages = on_ranks(_loaded, case, PP2, folder, format)
    for results in (alone, stages):
        assert differences(saved, whole([at_load for at_load, _, _ in results])) == []
    later = [whole([after for _, after, _ in results]) for results in (alone, stages)]
    assert differences(*later) == []
