"""``split_matrices``: several homes orthogonalize a long matrix together, each a strip
of it.

One process with as many strips has the same bits, whatever TP and DP are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from megatron_muon.orthogonalize.iteration import makes_rows
from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.settings.coefficients import NsDtype
from megatron_muon.settings.config import NsIteration
from support.models.gpt import (
    Case,
    Topology,
    check,
    differences,
    on_ranks,
    start,
    trained,
)
from support.runs.topologies import (
    DP2,
    DP3,
    DP4,
    ONE,
    PP2_DP2,
    TP2,
    TP2_DP2,
    TP2_DP3,
    TP4,
)
from support.small_squares import rows_of_small_squares

# fc1 is 264 x 96 and tall, fc2 96 x 264 and wide
BASE = Case(steps=2, ffn=264, vocab=144)


def _shared(case: Case, ranks: int, **muon: Any) -> Case:
    return case.with_muon(split_matrices=ranks, **muon)


GATED = replace(BASE, gated=True)  # fc1 is 528 x 96
FOUR_GROUPS = replace(BASE, heads=8, groups=4)


def _matrices(case: Case, topology: Topology) -> list[tuple[str, int, int, int]]:
    matrices = start(case, topology).part.muon.plan.matrices
    return [(matrix.name, matrix.rows, matrix.cols, matrix.home) for matrix in matrices]


@pytest.mark.parametrize(
    "case, topology",
    [
        (_shared(BASE, 2), DP2),
        (_shared(BASE, 2), PP2_DP2),
        (_shared(BASE, 2), TP2),  # fc2's column parts are its strips
        (_shared(BASE, 4), TP2_DP2),  # fc2 comes as rows, from column parts
        # uneven rows and columns, one rank without a strip
        (_shared(BASE, 5), TP2_DP3),
        # a strip of two column parts
        (_shared(FOUR_GROUPS, 2, ns_dtype="fp32"), TP4),
        (_shared(BASE, 4), DP4),
        (_shared(BASE, 4), DP2),  # two strips on each rank
        # strips of 52 and 53 rows, two ranks with two
        (_shared(BASE, 5), DP3),
        (_shared(GATED, 4), Topology.of("dp6")),  # two ranks without a strip
        (_shared(BASE, 2, ns_iteration="gram"), DP2),
        (_shared(BASE, 3, ns_dtype="fp32"), DP3),
        (_shared(BASE, 2, round_bytes=1 << 16), DP4),  # in several rounds
    ],
)
def test_results_are_those_of_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)


@pytest.mark.parametrize(
    "iteration, dtype, coefficients",
    [
        *(("gram", dtype, "quintic") for dtype in get_args(NsDtype)),
        ("standard", "bf16", "quintic"),
    ],
)
@pytest.mark.parametrize(
    "strips, topology",
    [
        (4, TP2_DP2),
        (5, DP3),  # uneven rows, two ranks with two strips
        (2, DP3),  # one rank without a strip
    ],
)
def test_rows_of_squares_are_those_of_one_process(
    strips: int,
    topology: Topology,
    iteration: NsIteration,
    dtype: NsDtype,
    coefficients: str,
) -> None:
    settings = {"ns_iteration": iteration, "ns_coefficients": coefficients}
    case = _shared(BASE, strips, **settings, ns_dtype=dtype)
    with rows_of_small_squares():
        config = case.settings
        assert makes_rows(264, 96, strips, numerics_on(torch.device("cpu"), config))
    one = trained(case, ONE, rows_of_small_squares)
    assert differences(one, trained(case, topology, rows_of_small_squares)) == []


@pytest.mark.parametrize(
    "strips, topology, shapes",
    [
        (2, TP2_DP2, [(96, 132)] * 2),  # column parts of TP ranks
        (4, TP2_DP2, [(24, 264)] * 4),  # as rows
        (5, Topology.of("dp5"), [(19, 264)] * 4 + [(20, 264)]),
    ],
)
def test_a_wide_matrix_comes_in_column_parts_or_in_rows(
    strips: int, topology: Topology, shapes: list[tuple[int, int]]
) -> None:
    matrices = on_ranks(_matrices, _shared(BASE, strips), topology)[0]
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    wide = [matrix for matrix in matrices if matrix[0].startswith(name)]
    assert [m[0] for m in wide] == [f"{name}[strip {at}]" for at in range(strips)]
    assert [m[1:3] for m in wide] == shapes
    assert len({m[3] for m in wide}) == min(strips, topology.world_size)
