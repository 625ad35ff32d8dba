"""As test_topologies, where TP leaves a rank a vector of a matrix, or cuts inside a query group.

Whose a weight is, how it splits and its scale must follow from whole matrices alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.models.gpt import Case, Topology, check, truth

NARROW = Case(ffn=2, steps=3)  # fc1 is (2, 96): (1, 96) on each of two TP ranks
ONE_GROUP = Case(groups=1, steps=3)  # q q q q | q q k v
GATED = Case(heads=4, groups=1, output_gate=True, steps=3)


@pytest.mark.parametrize("case", [NARROW, replace(NARROW, gated=True)], ids=["plain", "gated"])
def test_a_matrix_of_which_a_rank_has_one_row_or_column_is_muons(case: Case) -> None:
    """``check`` wants it to be Muon's at TP 1 and at TP 2."""
    check(case, Topology(2, 1, 2))


def test_a_key_of_one_row_is_a_matrix_at_every_tp_size() -> None:
    """96 heads of 1, and one query group: K and V are (1, 96)."""
    case = Case(heads=96, groups=1, steps=3)
    result = check(case, Topology(2, 1, 1))
    before = truth(replace(case, steps=0))["main"]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert bool((result["main"][name] != before[name]).all())


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (ONE_GROUP, Topology(2, 1, 2)),
        (ONE_GROUP, Topology(2, 2, 2, overlap=True)),
        (replace(ONE_GROUP, heads=8, groups=2), Topology(4, 1, 1)),  # q q q | q k v | …
        (replace(ONE_GROUP, heads=4), Topology(4, 1, 1)),  # half of k on each of the last two
        (replace(ONE_GROUP, heads=4, bf16=False, muon=(("ns_dtype", "fp32"),)), Topology(4, 1, 2)),
        (GATED, Topology(2, 1, 2)),
        (replace(GATED, heads=8, groups=2), Topology(4, 1, 1)),
        (replace(ONE_GROUP, muon=(("split_qkv", False),)), Topology(2, 1, 2)),
    ],
    ids=["1-2", "1-2-pp", "2-4", "1-4", "1-4-fp32", "gate-1-2", "gate-2-4", "one-matrix"],
)
def test_more_tp_ranks_than_query_groups(case: Case, topology: Topology) -> None:
    check(case, topology)
