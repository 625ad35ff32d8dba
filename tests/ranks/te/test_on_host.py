"""State on the host (--optimizer-cpu-offload): Muon's comes by round, AdamW's is Megatron's own.

Muon's part is that of a run without the flag, in bits. AdamW's is torch's, on the host.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support import te_on_cpu
from support.installed import VERSION
from support.models.gpt import (
    ON_HOST,
    Case,
    Topology,
    differences,
    muon_weights,
    trained,
    truth,
)
from support.runs.whole import Whole

pytestmark = pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path")

PLAIN = Case(steps=4)
HOSTED = replace(
    PLAIN,
    narrow=(
        ON_HOST,
        ("overlap_cpu_optimizer_d2h_h2d", True),
        ("optimizer_offload_fraction", 1.0),
        *((("store_param_remainders", False),) if VERSION >= (0, 13) else ()),
    ),
)
HALVES = replace(HOSTED, narrow=(*HOSTED.narrow[:3], ("store_param_remainders", True)))
BF16 = replace(HOSTED, narrow=(*HOSTED.narrow, ("exp_avg_dtype", torch.bfloat16)))
ONE_BY_ONE = (("round_bytes", 1),)
MOE = {"moe": True, "grouped": "te"}


def _without(case: Case) -> Case:
    """The same run with the state on the device."""
    narrow = [(name, value) for name, value in case.narrow or () if name not in _OFFLOADS]
    return replace(case, narrow=tuple(narrow))


_OFFLOADS = {ON_HOST[0], "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"}


def _check_same(one: Whole, other: Whole, case: Case) -> None:
    """Muon's in bits. Torch's AdamW on a CPU rounds a tail otherwise than a vector."""
    muons = muon_weights(case)
    kinds = ("main", "exp_avg", "params")[: 2 if VERSION < (0, 13) else 3]  # weights by halves
    bits = [{k: {n: whole[k][n] for n in muons} for k in kinds} for whole in (one, other)]
    assert differences(*bits) == []
    if case == BF16:  # HybridDeviceOptimizer holds AdamW's in fp32, whatever is asked
        return
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            assert torch.allclose(value, other[kind][name], rtol=2e-5, atol=1e-7), (kind, name)


@pytest.mark.parametrize(
    "case",
    [
        HOSTED,
        replace(HOSTED, clip=1.0, fp32_grads=False),
        replace(HOSTED, muon=ONE_BY_ONE),
        HALVES,
        BF16,
        replace(HOSTED, bf16=False, fp16=True, overflow=((1, "*.linear_fc1.weight"),)),
        replace(HOSTED, **MOE),
    ],
    ids=["plain", "clip", "rounds", "halves", "bf16", "fp16", "experts"],
)
def test_muons_part_is_that_of_state_on_the_device(case: Case) -> None:
    if case == HALVES and VERSION < (0, 13):
        pytest.skip("this core has no such setting")
    _check_same(truth(_without(case)), truth(case), case)


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (HOSTED, Topology(2, 2, 2, overlap=True, sequence_parallel=True)),
        (replace(HOSTED, fp32_grads=False), Topology(dp=3)),
        (replace(HOSTED, **MOE), Topology(tp=2, dp=2, ep=2, sequence_parallel=True)),
        (replace(HOSTED, layers=4), Topology(pp=2, dp=2, chunks=2)),
    ],
    ids=["dense", "dp3", "experts", "vpp"],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    case = replace(case, muon=ONE_BY_ONE)
    _check_same(truth(case), trained(case, topology), case)
