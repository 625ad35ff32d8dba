"""Muon over GPTs of Transformer Engine's own modules equals one process, bit for bit.

Their Python is real, with the names, shapes and marks of its parameters; see ``te_on_cpu``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support import te_on_cpu
from support.models.gpt import Case, Topology, check

pytestmark = pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path")

BF16 = Case(steps=4)
MOE = replace(BF16, moe=True)
GROUPED = replace(MOE, grouped="te")
MLA = replace(BF16, mla="duplicated")


def _sp(*sizes: int, **topology: object) -> Topology:
    return Topology(*sizes, sequence_parallel=True, **topology)


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(BF16, _sp(2, 2, 2, overlap=True), id="dense"),
        pytest.param(replace(BF16, gated=True), Topology(2, 1, 2), id="gated"),
        pytest.param(replace(BF16, bf16=False), Topology(dp=3), id="fp32"),
        pytest.param(
            replace(BF16, layers=4), Topology(pp=2, dp=2, chunks=2, overlap=True), id="vpp"
        ),
        pytest.param(replace(GROUPED, gated=True), _sp(2, 1, 2, ep=2), id="grouped-gated"),
        pytest.param(GROUPED, _sp(2, ep=2, etp=1), id="grouped-etp1"),
        pytest.param(GROUPED, Topology(dp=6, ep=2), id="grouped-dp6"),
        pytest.param(MOE, _sp(2, 1, 2, ep=2), id="sequential"),
        pytest.param(MLA, _sp(2, 1, 2), id="mla"),
        pytest.param(
            replace(GROUPED, mla="duplicated", gated=True), _sp(2, 1, 2, ep=2), id="mla-grouped"
        ),
        pytest.param(replace(BF16, mtp=True), Topology(2, 2, 2), id="mtp"),
        pytest.param(
            replace(GROUPED, dense_layers=1), Topology(pp=2, dp=2, ep=2), id="dense-and-experts"
        ),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)
