"""Muon over GPTs of Transformer Engine's own modules equals one process, bit for bit.

Their Python is real, with the names, shapes and marks of its parameters; see ``te_on_cpu``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import te_on_cpu
from support.models.gpt import Case, Topology, check, runs_of

pytestmark = pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path")

T = Topology
SP = {"sequence_parallel": True}
BF16 = Case(steps=4)
MOE = replace(BF16, moe=True)
GROUPED = replace(MOE, grouped="te")
MLA = replace(BF16, mla="duplicated")


LARGE, EP2 = T(2, 2, 2, overlap=True, **SP), T(2, 1, 2, ep=2, **SP)
RUNS: dict[str, tuple[Case, list[Topology], list[Topology]]] = {
    "dense": (BF16, [LARGE], []),
    "gated": (replace(BF16, gated=True), [T(2, 1, 2)], []),
    "fp32": (replace(BF16, bf16=False), [T(dp=3)], []),
    "vpp": (replace(BF16, layers=4), [T(pp=2, dp=2, chunks=2, overlap=True)], []),
    "grouped-gated": (replace(GROUPED, gated=True), [EP2], []),
    "grouped": (GROUPED, [T(2, ep=2, etp=1, **SP), T(dp=6, ep=2)], []),
    "sequential": (MOE, [EP2], []),
    "mla": (MLA, [T(2, 1, 2, **SP)], []),
    "mla-grouped": (replace(GROUPED, mla="duplicated", gated=True), [EP2], []),
    "mtp": (replace(BF16, mtp=True), [T(2, 2, 2)], []),
    "dense-and-experts": (replace(GROUPED, dense_layers=1), [T(pp=2, dp=2, ep=2)], []),
}


@pytest.mark.parametrize(("case", "topology"), runs_of(RUNS))
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)
