"""The engine runs a rule that is not Muon, with all that it offers, as one process
does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.models.gpt import Case, Topology, trained
from support.runs.cases import muon_weights

# Travelling numbers are exact in fp32, so that only the order of sums differs.
RULE = "support.runs.other_rules:Centred"
CASE = Case(layers=2, steps=2, bf16=False).with_muon(rule=RULE, ns_dtype="fp32")
ROUNDS = CASE.with_muon(round_bytes=1)
REPLICAS = replace(CASE, mla="duplicated")
# Norms are sums of at most 1e5 numbers in fp32 by slice, then over slices; two steps.
TOLERANCE = 2e-6


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (CASE, Topology(tp=2, dp=2)),
        (CASE, Topology(dp=3, overlap=True)),
        (ROUNDS, Topology(tp=2, dp=2)),
        (REPLICAS, Topology(tp=2, dp=2)),
    ],
    ids=["tp2-dp2", "dp3-overlap", "rounds-tp2-dp2", "replicas-tp2-dp2"],
)
def test_a_rule_with_sums_is_that_of_one_process(
    case: Case, topology: Topology
) -> None:
    alone = trained(case, Topology())
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
