"""What every supported megatron-core is held to; the other tests look deeper at one of them.

`bash tests/run.sh` runs this for each of several: see tests/cores.txt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpt import Case, Topology, check
from installed import VERSION
from saving import formats
from test_checkpoint import FROZEN_STAGE
from test_checkpoint import check as check_resumed

BF16 = Case(steps=4, clip=0.0)
FP32 = replace(BF16, bf16=False)
FASTER = replace(BF16, faster=("decoder.layers.0.*", "embedding.*"))
MOE = replace(BF16, moe=True)
# A stage has no experts, as the first of DeepSeek's: before core 0.14 it has one optimizer less.
DENSE_STAGE = replace(MOE, dense_layers=1)
FP16_MOE = Case(steps=6, bf16=False, fp16=True, moe=True, overflow=((2, "*.experts.*"),))


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(BF16, Topology(2, 2, 2, overlap=True), id="tp2-pp2-dp2-overlap"),
        pytest.param(FP32, Topology(2, 2, 2, sequence_parallel=True), id="tp2-pp2-dp2-fp32-sp"),
        pytest.param(BF16, Topology(dp=3, overlap=True), id="dp3-overlap"),
        pytest.param(FASTER, Topology(dp=3), id="dp3-groups"),
        pytest.param(BF16, Topology(tp=2, cp=2), id="tp2-cp2"),
        pytest.param(
            replace(BF16, layers=4), Topology(pp=2, dp=2, chunks=2, overlap=True), id="pp2-dp2-vpp2"
        ),
        pytest.param(BF16, Topology(dp=4, instances=2), id="dp4-two-instances"),
        pytest.param(replace(BF16, tied=True), Topology(pp=2, dp=2), id="pp2-dp2-tied"),
        pytest.param(replace(BF16, gated=True), Topology(tp=2, dp=2), id="tp2-dp2-gated"),
        pytest.param(replace(BF16, mla="column"), Topology(tp=2), id="tp2-mla"),
        pytest.param(replace(BF16, mtp=True), Topology(pp=2), id="pp2-mtp"),
        pytest.param(
            MOE, Topology(tp=2, dp=2, ep=2, sequence_parallel=True), id="tp2-dp2-ep2-sequential"
        ),
        pytest.param(
            replace(MOE, grouped="te", gated=True),
            Topology(tp=2, dp=2, ep=2, sequence_parallel=True),
            id="tp2-dp2-ep2-te",
        ),
        pytest.param(
            replace(MOE, grouped="legacy"),
            Topology(tp=2, dp=2, ep=2, sequence_parallel=True),
            id="tp2-dp2-ep2-legacy",
        ),
        pytest.param(MOE, Topology(dp=6, ep=2), id="dp6-ep2"),
        pytest.param(DENSE_STAGE, Topology(pp=2, dp=2, ep=2), id="pp2-dp2-ep2-dense-stage"),
        pytest.param(FP16_MOE, Topology(dp=2, ep=2), id="dp2-ep2-fp16-overflow"),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize("format", formats())
@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(replace(BF16, steps=4), Topology(dp=3, overlap=True), id="dp3-overlap"),
        pytest.param(replace(FROZEN_STAGE, steps=4), Topology(pp=2, dp=2), id="pp2-dp2-frozen"),
    ],
)
def test_a_resumed_run_goes_on(case: Case, topology: Topology, format: str, tmp_path: Path) -> None:
    if case.frozen and format.startswith("fully"):
        pytest.skip("Megatron keeps a weight of all layers in one tensor, which must be whole")
    check_resumed(case, topology, format, tmp_path)


def test_the_version_is_one_that_is_listed() -> None:
    from megatron_muon.mcore.hooks import NEWEST, OLDEST, check_hooks

    assert OLDEST <= VERSION <= NEWEST
    check_hooks()
