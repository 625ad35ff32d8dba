"""The engine runs a rule that is not Muon, with all that it offers, as one process
does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.models.gpt import Case, Topology, trained
from support.runs.cases import muon_weights
from support.runs.topologies import DP3_OVERLAP, ONE, TP2_DP2

# Travelling numbers are exact in fp32, so that only the order of sums differs.
CASE = Case(steps=2, bf16=False).with_muon(
    rule="support.runs.other_rules:Centred", ns_dtype="fp32"
)
ROUNDS = CASE.with_muon(round_bytes=1)
REPLICAS = replace(CASE, mla="duplicated")
# Norms are sums of at most 1e5 numbers in fp32 by slice, then over slices; two steps.
TOLERANCE = 2e-6


@pytest.mark.parametrize(
    "case, topology",
    [(CASE, TP2_DP2), (CASE, DP3_OVERLAP), (ROUNDS, TP2_DP2), (REPLICAS, TP2_DP2)],
)
def test_a_rule_with_sums_is_that_of_one_process(
    case: Case, topology: Topology
) -> None:
    alone = trained(case, ONE)
    shared = trained(case, topology)
    for kind in ("main", "exp_avg"):
        for name, expected in alone[kind].items():
            torch.testing.assert_close(
                shared[kind][name], expected, rtol=TOLERANCE, atol=1e-7
            )
    for name in muon_weights(case):
        # a parameter of several matrices has as many ones as matrices in its squares
        squares = float(shared["main"][name].double().square().sum())
        assert round(squares) >= 1
        assert abs(squares - round(squares)) < 1e-5
