"""``split_matrices``: several homes orthogonalize a long matrix together, each a strip of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.models.gpt import Case, Topology, check, start, trained
from support.ranks import run
from support.runs.whole import differences

BASE = Case(steps=4, ffn=264, vocab=144)  # fc1 is 264 x 96 and tall, fc2 96 x 264 and wide


def _shared(case: Case, ranks: int, **muon: Any) -> Case:
    settings = {**dict(case.muon), "split_matrices": ranks, **muon}
    return replace(case, muon=tuple(settings.items()))


GATED = replace(BASE, gated=True)  # fc1 is 528 x 96


def _matrices(case: Case, topology: Topology) -> list[tuple[str, int, int, int]]:
    muon: Any = start(case, topology).optimizer
    plan = muon.chained_optimizers[0].muon.plan
    return [(matrix.name, matrix.rows, matrix.cols, matrix.home) for matrix in plan.matrices]


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (_shared(BASE, 2), Topology(1, 1, 2)),
        (_shared(BASE, 2), Topology(1, 2, 2)),
        (_shared(BASE, 4), Topology(1, 1, 4)),
        (_shared(BASE, 4), Topology(1, 1, 2)),  # two strips on each rank
        (_shared(BASE, 5), Topology(1, 1, 3)),  # strips of 52 and 53 rows, two ranks with two
        (_shared(GATED, 4), Topology(1, 1, 6)),  # two ranks without a strip
        (_shared(BASE, 2, ns_iteration="gram"), Topology(1, 1, 2)),
        (_shared(BASE, 3, ns_dtype="fp32"), Topology(1, 1, 3)),
        (_shared(BASE, 2, round_bytes=1 << 16), Topology(1, 1, 4)),  # in several rounds
    ],
    ids=str,
)
def test_results_are_those_of_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_column_parts_of_tp_ranks_are_strips(dp: int) -> None:
    """Of as many as divide the TP ranks; so TP decides how many strips a wide matrix has."""
    case = _shared(BASE, 2)
    expected, shared = trained(case, Topology(2, 1, 1)), trained(case, Topology(2, 1, dp))
    assert differences(expected, shared) == []
    matrices = run(_matrices, 2 * dp, case, Topology(2, 1, dp))[0]
    wide = [matrix for matrix in matrices if "layers.0.mlp.linear_fc2" in matrix[0]]
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    assert [m[:3] for m in wide] == [(f"{name}[strip {at}]", 96, 132) for at in (0, 1)]
    assert wide[0][3] != wide[1][3]
