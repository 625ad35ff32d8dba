"""Muon through Megatron's own forward, backward and schedules, in every parallelism: it learns."""

import itertools
from dataclasses import replace

import pytest
import torch

from support.models.parallel_model import Model, Topology
from support.parallel import differences, trained

BF16 = Model(dtype=torch.bfloat16, optimizer="muon", steps=4)
MOE = replace(BF16, moe=True, shared=True)
DEEP = replace(BF16, layers=4)
FP16 = replace(BF16, dtype=torch.float16)


@pytest.mark.parametrize(
    ("m", "t"),
    [
        (BF16, Topology(cp=2)),
        (BF16, Topology(tp=2, cp=2, pp=2)),
        (MOE, Topology(dp=2, ep=2)),
        (MOE, Topology(tp=2, ep=2, dispatcher="alltoall")),
        (MOE, Topology(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall")),
        (MOE, Topology(cp=2, ep=2)),
        (MOE, Topology(pp=2, dp=4, ep=2, overlap=True)),
        (replace(MOE, grouped=True), Topology(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall")),
        (DEEP, Topology(pp=2, vpp=2, dp=2, overlap=True)),
        (DEEP, Topology(pp=2, vpp=2, dp=2, overlap=True, with_step=True)),
        (BF16, Topology(dp=4, instances=2, overlap=True)),
        (MOE, Topology(dp=4, ep=2, instances=2)),
        (replace(BF16, mla=True), Topology(tp=2, dp=2)),
        (replace(BF16, mtp=True), Topology(pp=2, dp=2)),
        (replace(BF16, recompute=True, dropout=0.1), Topology(tp=2)),
    ],
    ids=str,
)
def test_the_loss_falls_with_each_step(m: Model, t: Topology) -> None:
    trained(m, t)


@pytest.mark.parametrize("m", [FP16, replace(FP16, moe=True)], ids=str)
def test_fp16_skips_steps_until_the_loss_scale_fits(m: Model) -> None:
    """On all ranks alike; the losses say that a skipped step changes nothing."""
    topology = Topology(dp=2, ep=2 if m.moe else 1)
    log = trained(replace(m, loss_scale=2.0**20, steps=8), topology).log
    ok, scales = log["ok"], log["scales"]
    assert ok[:2] == [False, False] and ok.count(True) >= 3
    for index, (before, after) in enumerate(itertools.pairwise(scales)):
        assert after == (before if ok[index] else before / 2)


@pytest.mark.parametrize(
    ("plain", "overlapped"),
    [
        (Topology(pp=2, vpp=2, dp=2), Topology(pp=2, vpp=2, dp=2, overlap=True)),
        (Topology(pp=2, vpp=2, dp=2), Topology(pp=2, vpp=2, dp=2, overlap=True, with_step=True)),
        (Topology(dp=2, ep=2), Topology(dp=2, ep=2, overlap=True)),
        (Topology(cp=2), Topology(cp=2, overlap=True)),
    ],
    ids=str,
)
def test_overlap_does_not_change_a_run(plain: Topology, overlapped: Topology) -> None:
    """Bitwise: a sum of two ranks has one order, and the clip, whose norm has many, is off."""
    m = replace(MOE if plain.ep > 1 else DEEP, clip=0.0)
    one, other = trained(m, plain), trained(m, overlapped)
    assert one.losses == other.losses
    assert set(differences(one, other).values()) == {0.0}
