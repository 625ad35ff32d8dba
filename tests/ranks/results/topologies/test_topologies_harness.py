"""What the comparisons of test_topologies* rest on: Megatron's own AdamW passes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import Case, Topology, check

ADAM = Case(optimizer="adam", lr=1e-3, steps=3)
MOE = replace(ADAM, moe=True, gated=True)
CHUNKS = Topology(pp=2, dp=2, chunks=2, overlap=True, step_overlap=True)
PLAIN = {
    "chunks": (replace(ADAM, layers=4), CHUNKS),
    "instances": (ADAM, Topology(dp=4, instances=2)),
    "experts": (MOE, Topology(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, overlap=True)),
    "te-mla": (replace(MOE, grouped="te", mla="duplicated"), Topology(tp=2, dp=2, ep=2)),
    "mtp-tied": (replace(ADAM, mtp=True, tied=True), Topology(tp=2, pp=2)),
    "fp16": (replace(ADAM, bf16=False, fp16=True), Topology(2, 1, 2)),
}


@pytest.mark.parametrize(("case", "topology"), PLAIN.values(), ids=PLAIN.keys())
def test_plain_adam_passes_the_same_comparison(case: Case, topology: Topology) -> None:
    check(case, topology)
