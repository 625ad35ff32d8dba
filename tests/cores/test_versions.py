"""What every supported megatron-core is held to; the other tests look deeper at one of
them.

`bash tests/run.sh` runs this for each of several: see tests/cores.txt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from support.checkpoints import saving, sealing
from support.checkpoints.resharding import loaded, saved
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import formats
from support.installed import VERSION
from support.models.gpt import (
    Case,
    Topology,
    check,
    runs_of,
    trained,
    truth,
)
from support.models.open_buckets import buckets_open
from support.models.other_order import in_other_order
from support.ranks import run
from support.runs.topologies import DP2, DP3_OVERLAP, PP2_DP2
from support.runs.whole import differences, whole

BF16 = Case(steps=4, clip=0.0)
FP32 = replace(BF16, bf16=False)
# Before core 0.14 the ranks of a frozen stage have stubs of optimizers.
FROZEN_STAGE = Case(
    steps=4, frozen=("decoder.layers.1.*", "decoder.final*", "output_layer*")
)
FASTER = replace(BF16, faster=("decoder.layers.0.*", "embedding.*"))
MOE = replace(BF16, moe=True)
# A stage has no experts, as the first of DeepSeek's: before core 0.14 it has one
# optimizer less.
DENSE_STAGE = replace(MOE, dense_layers=1)
# fp32 among bf16
ISLANDS = replace(BF16, islands=("*.linear_fc1.weight", "*layernorm.weight"))
FP16_MOE = Case(
    steps=6, bf16=False, fp16=True, moe=True, overflow=((2, "*.experts.*"),)
)


RUNS = {
    "bf16": (
        BF16,
        "tp2 pp2 dp2 overlap, dp3 overlap, tp2 cp2, dp4 instances2",
    ),
    "fp32": (FP32, "tp2 pp2 dp2 sp"),
    "groups": (FASTER, "dp3"),
    "islands": (ISLANDS, "tp2 pp2 dp2 overlap"),
    "chunks": (replace(BF16, layers=4), "pp2 dp2 overlap chunks2"),
    "tied": (replace(BF16, tied=True), "pp2 dp2"),
    "gated": (replace(BF16, gated=True), "tp2 dp2"),
    "mla": (replace(BF16, mla="column"), "tp2"),
    "mtp": (replace(BF16, mtp=True), "pp2"),
    "experts": (MOE, "tp2 dp2 sp ep2, dp6 ep2"),
    "te": (replace(MOE, grouped="te", gated=True), "tp2 dp2 sp ep2"),
    "legacy": (replace(MOE, grouped="legacy"), "tp2 dp2 sp ep2"),
    "dense-stage": (DENSE_STAGE, "pp2 dp2 ep2"),
    "fp16-overflow": (FP16_MOE, "dp2 ep2"),
}


@pytest.mark.parametrize("case, topology", runs_of(RUNS))
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize("format", formats())
@pytest.mark.parametrize(
    "case, topology",
    [
        pytest.param(replace(BF16, steps=4), DP3_OVERLAP, id="dp3-overlap"),
        pytest.param(FROZEN_STAGE, PP2_DP2, id="pp2-dp2-frozen"),
    ],
)
def test_a_run_resumes(
    case: Case, topology: Topology, format: str, tmp_path: Path
) -> None:
    if case.frozen and format.startswith("fully"):
        pytest.skip(
            "Megatron keeps a weight of all layers in one tensor, which must be whole"
        )
    check_resumed(case, topology, format, tmp_path)


needs_layouts = pytest.mark.skipif(
    VERSION < (0, 18), reason="this Megatron takes no layout"
)


@pytest.mark.parametrize(
    "case, topology",
    [
        pytest.param(
            replace(BF16, layers=8),
            Topology.of("tp2 pp2 dp2 overlap"),
            id="tp2-pp2-dp2",
        ),
        pytest.param(
            replace(MOE, layers=4), Topology.of("dp4 overlap ep2"), id="dp4-ep2"
        ),
    ],
)
def test_a_number_of_buckets_that_the_model_decides_changes_no_bit(
    case: Case, topology: Topology
) -> None:
    result = trained(case, topology, buckets_open)
    assert differences(truth(case), result) == []


def _saved_in_another_order(*args: Any) -> Any:
    with in_other_order():
        return saved(*args)


@needs_layouts
@pytest.mark.parametrize("format", formats())
@pytest.mark.parametrize("dp", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_checkpoint_with_another_order_in_its_buckets_loads(
    format: str, dp: int, tmp_path: Path
) -> None:
    """As earlier versions wrote them. And two further steps."""
    topology = Topology.of("dp3 overlap bucket_size20000")
    there = replace(topology, dp=dp)
    case = replace(BF16, layers=4)
    wrote = run(_saved_in_another_order, 3, case, topology, format, str(tmp_path))
    read = run(loaded, dp, case, there, format, str(tmp_path))
    for one, two in zip(zip(*wrote, strict=True), zip(*read, strict=True), strict=True):
        assert differences(whole(list(one)), whole(list(two))) == []


def _hashed(folder: str) -> str | None:
    with mock.patch.dict(saving.OPTIONS, verify_integrity=True):
        sealing.saved(BF16, DP2, formats()[0], folder)
        error: str | None = sealing.loaded(BF16, DP2, formats()[0], folder)["error"]
    return error


@pytest.mark.skipif(VERSION < (0, 19), reason="--verify-integrity is newer")
def test_megatrons_own_hashes_have_the_digests(tmp_path: Path) -> None:
    assert run(_hashed, 2, str(tmp_path)) == [None, None]
    assert '"megatron_muon.json": ' in (tmp_path / "integrity.json").read_text()
