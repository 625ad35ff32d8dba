"""The plugin against the float64 oracle, with clipping
(``expected/oracle_cases.py``).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from support.expected.oracle_cases import (
    BF16,
    CASES,
    EXPERTS,
    FP32,
    TOPOLOGIES,
    WHERE,
    allowed,
    compare,
    computed,
    oracle_for,
    plugin,
)
from support.expected.shaking import UNIT
from support.models.gpt import Case, Topology
from support.runs.topologies import TP2_PP2_DP2


@pytest.mark.parametrize("which", CASES)
def test_plugin_equals_the_oracle(which: str) -> None:
    assert compare(CASES[which], WHERE.get(which, TP2_PP2_DP2)) == {}


def test_few_decays_are_decided_by_a_rounding() -> None:
    """Weights that may have one or not: 21 of 149,000, in one of five steps."""
    either = allowed(CASES["cautious-decay"]).either.values()
    assert 0 < sum(int(size.count_nonzero()) for size in either) < 100


@pytest.mark.parametrize("topology", TOPOLOGIES[:2])
@pytest.mark.parametrize("case", [FP32, BF16])
def test_other_topologies_equal_the_oracle(case: Case, topology: Topology) -> None:
    """With the clip active, so that they need not equal 2x2x2 bit for bit."""
    assert compare(case, topology) == {}


@pytest.mark.parametrize("which", ["fp32", "bf16"])
def test_adamw_alone_equals_the_oracle(which: str) -> None:
    """Megatron without the plugin: what is compared above is not only agreed on by
    us.
    """
    case = replace(CASES[which], optimizer="adam", lr=1e-3, muon=())
    assert compare(case, TP2_PP2_DP2) == {}


@pytest.mark.parametrize(
    "which, topologies", [("fp32", TOPOLOGIES), ("moe", [EXPERTS])]
)
def test_global_norm_equals_the_oracles(which: str, topologies: list[Topology]) -> None:
    """Each partial sum of n squares is rounded by u at most, of random sign: u sqrt(n)
    of the sum, half of it in the root. With experts over two optimizers; routers and
    shared experts' gates are counted once over TP.
    """
    case = CASES[which]
    oracle = oracle_for(case)
    computed(case, oracle)
    bound = (
        UNIT["fp32"] * math.sqrt(sum(w.numel() for w in oracle.weights.values())) / 2
    )
    for topology in topologies:
        assert plugin(case, topology)[1] == pytest.approx(oracle.norms, rel=bound)


def test_clip_is_active_in_some_steps_and_not_in_others() -> None:
    norms = plugin(FP32, TOPOLOGIES[0])[1]
    assert min(norms) < FP32.clip < max(norms)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bf16_parameters_are_the_main_parameters_rounded(topology: Topology) -> None:
    result = plugin(BF16, topology)[0]
    for name, main in result["main"].items():
        assert torch.equal(result["params"][name], main.bfloat16().float()), name
