"""Muon through Megatron's own forward, backward and schedules, in every parallelism: it learns."""

import itertools
from dataclasses import replace

import pytest

from support.runs.cases import Case, Topology
from support.runs.training import MODEL, differences, said, spread, trained

BF16 = replace(MODEL, bf16=True, optimizer="muon", steps=4)
MOE = replace(BF16, moe=True)
DEEP = replace(BF16, layers=4)
FP16 = replace(BF16, bf16=False, fp16=True)


@pytest.mark.parametrize(
    ("m", "t"),
    [
        (BF16, spread(cp=2)),
        (BF16, spread(tp=2, cp=2, pp=2)),
        (MOE, spread(dp=2, ep=2)),
        (MOE, spread(tp=2, ep=2, dispatcher="alltoall")),
        (MOE, spread(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall")),
        (MOE, spread(cp=2, ep=2)),
        (MOE, spread(pp=2, dp=4, ep=2, overlap=True)),
        (replace(MOE, grouped="legacy"), spread(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall")),
        (DEEP, spread(pp=2, vpp=2, dp=2, overlap=True)),
        (DEEP, spread(pp=2, vpp=2, dp=2, overlap=True, step_overlap=True)),
        (BF16, spread(dp=4, instances=2, overlap=True)),
        (MOE, spread(dp=4, ep=2, instances=2)),
        (replace(BF16, mla="column"), spread(tp=2, dp=2)),
        (replace(BF16, mtp=True), spread(pp=2, dp=2)),
        (replace(BF16, recompute=True, dropout=0.1), spread(tp=2)),
    ],
    ids=said,
)
def test_the_loss_falls_with_each_step(m: Case, t: Topology) -> None:
    trained(m, t)


@pytest.mark.parametrize("m", [FP16, replace(FP16, moe=True, shared=False)], ids=said)
def test_fp16_skips_steps_until_the_loss_scale_fits(m: Case) -> None:
    """On all ranks alike; the losses say that a skipped step changes nothing."""
    topology = spread(dp=2, ep=2 if m.moe else 1)
    log = trained(replace(m, loss_scale=2.0**22, steps=8), topology).log
    ok, scales = log["ok"], log["scales"]
    assert ok[:2] == [False, False] and ok.count(True) >= 3
    for index, (before, after) in enumerate(itertools.pairwise(scales)):
        assert after == (before if ok[index] else before / 2)


@pytest.mark.parametrize(
    ("plain", "overlapped"),
    [
        (spread(pp=2, vpp=2, dp=2), spread(pp=2, vpp=2, dp=2, overlap=True)),
        (spread(pp=2, vpp=2, dp=2), spread(pp=2, vpp=2, dp=2, overlap=True, step_overlap=True)),
        (spread(dp=2, ep=2), spread(dp=2, ep=2, overlap=True)),
        (spread(cp=2), spread(cp=2, overlap=True)),
    ],
    ids=said,
)
def test_overlap_does_not_change_a_run(plain: Topology, overlapped: Topology) -> None:
    """Bitwise: a sum of two ranks has one order, and the clip, whose norm has many, is off."""
    m = replace(MOE if plain.ep > 1 else DEEP, clip=0.0)
    one, other = trained(m, plain), trained(m, overlapped)
    assert one.losses == other.losses
    assert set(differences(one, other).values()) == {0.0}
