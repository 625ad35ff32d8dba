"""Strips of matrices that several homes share: where they are cut, whose they become,
and why.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_muon.orthogonalize.matmul import TORCH_DTYPE, numerics_on
from megatron_muon.orthogonalize.numerics import Device, Numerics
from megatron_muon.orthogonalize.strips import orthogonalize_strips
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import Work
from megatron_muon.planning.layout import Matrix, Parameter, Span, Strip
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sharing.strip_time import strip_time
from megatron_muon.planning.sharing.strips import can_share, in_strips, strip_homes
from megatron_muon.runtime import collectives
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.exchange.sharers import Sharers
from megatron_muon.settings.config import MuonConfig, named
from support.sections import whole_parameter
from support.settings import WITH

GRAM = MuonConfig(split_matrices=2, ns_iteration="gram")


def _plan(
    shapes: list[tuple[int, int, int | None]],
    tp: int,
    dp: int,
    config: MuonConfig,
    device: Device = "cuda",
) -> ExchangePlan:
    parameters: list[Parameter] = []
    for number, (rows, cols, dim) in enumerate(shapes):
        start = parameters[-1].span.stop if parameters else 0
        parameters.append(whole_parameter(f"w{number}", (rows, cols), dim, tp, start))
    stop = -(-parameters[-1].span.stop // dp) * dp
    placed = [replace(parameter, bucket=Span(0, stop)) for parameter in parameters]
    rows_of = tuple(tuple(range(t * dp, (t + 1) * dp)) for t in range(tp))
    return make_plan(placed, RankGrid((rows_of,)), Numerics(config, device))


@given(st.data())
def test_a_matrix_goes_to_the_free_team_that_holds_most_of_it(
    data: st.DataObject,
) -> None:
    """Teams of 2 and of 3 beside each other, by the rule written out: least work of the
    busiest rank, then most elements, then the first.
    """
    size = data.draw(st.integers(1, 9))
    counts = data.draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=6))
    before = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    strips = [Strip(64, 8, at, count) for count in counts for at in range(count)]
    holder = st.dictionaries(st.integers(0, size - 1), st.integers(1, 3), max_size=3)
    flops = [data.draw(st.integers(1, 4)) for count in counts for _ in [data] * count]
    works = [Work(each, 64, data.draw(holder)) for each in flops]
    loads, expected = list(before), {}
    firsts = [at for at, strip in enumerate(strips) if strip.number == 0]
    for first in sorted(firsts, key=lambda at: (-works[at].flops, at)):
        count = strips[first].count
        ranks = min(size, count)
        members = range(first, first + count)

        def order(
            team: int, ranks: int = ranks, members: range = members
        ) -> tuple[int, int, int]:
            own = range(team * ranks, (team + 1) * ranks)
            elements = sum(
                works[at].held.get(rank, 0) for at in members for rank in own
            )
            return max(loads[own.start : own.stop]), -elements, team

        team = min(range(max(1, size // count)), key=order)
        for at in range(count):
            home = expected[first + at] = team * ranks + at * ranks // count
            loads[home] += works[first + at].flops
    assert strip_homes(strips, works, before) == expected


@given(
    st.lists(
        st.tuples(
            st.integers(1, 40), st.integers(1, 40), st.sampled_from([0, 1, None])
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 5),
    st.integers(2, 6),
)
def test_strips_cover_their_matrix_and_homes_are_neighbours(
    shapes: list[tuple[int, int, int | None]], tp: int, dp: int, count: int
) -> None:
    """``make_plan`` checks that every element comes once, and that every piece gets
    directions.
    """
    config = replace(GRAM, split_matrices=count)
    plan = _plan(shapes, tp, dp, config)
    whole = _plan(shapes, tp, dp, replace(config, split_matrices="off"))
    assert sum(m.numel for m in plan.matrices) == sum(m.numel for m in whole.matrices)
    for one in plan.shared:
        homes = list(one.homes)
        assert max(one.rows, one.cols) >= 2 * min(one.rows, one.cols)
        assert len(set(homes)) == min(len(homes), plan.size)
        assert max(homes) - min(homes) < len(homes) and homes == sorted(homes)
        assert len(homes) == count  # whatever TP is
    # squares, by each further home
    replicated = sum(plan.ns_flops()) - sum(whole.ns_flops())
    homes_beyond = sum(len(set(one.homes)) - 1 for one in plan.shared)
    assert (replicated > 0) == (homes_beyond > 0) and replicated >= 0


@pytest.mark.parametrize(
    "rows, cols, dim, tp, strips",
    [
        (40, 16, None, 1, [(10, 16)] * 4),
        (42, 16, None, 1, [(10, 16), (11, 16), (10, 16), (11, 16)]),
        (16, 40, None, 1, [(4, 40)] * 4),  # its homes receive rows
        (18, 40, None, 1, [(4, 40), (5, 40), (4, 40), (5, 40)]),
        (3, 40, None, 1, []),  # fewer rows than strips
        (64, 3, None, 1, []),  # fewer rows of squares than homes
        (3, 16, 1, 4, []),
        (20, 16, 0, 2, [(10, 16)] * 4),  # a strip is half of a TP rank's rows
        (16, 20, 1, 2, [(4, 40)] * 4),  # more than TP ranks: rows
        (16, 10, 1, 8, [(16, 20)] * 4),  # a strip is the columns of two TP ranks
        (16, 20, 1, 3, [(4, 60)] * 4),
        (40, 8, 1, 2, [(10, 16)] * 4),  # tall, and TP cuts the columns
        (40, 16, None, 2, [(10, 16)] * 4),  # replicas
    ],
)
def test_where_a_matrix_is_cut(
    rows: int, cols: int, dim: int | None, tp: int, strips: list[tuple[int, int]]
) -> None:
    cut = in_strips(whole_parameter("w", (rows, cols), dim, tp), [4])
    found = [(m.rows, m.cols) for m in cut.matrices if m.strip is not None]
    assert found == strips
    assert bool(strips) == (cut.matrices[0].strip is not None)


TINY = (1, 2, 3, 5, 64)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 64])
def test_homes_of_a_tiny_matrix_make_a_step(count: int) -> None:
    """Whether the plan shares it or not; the first and the last home step alone."""
    config = MuonConfig(split_matrices=count)
    for rows, cols, tp in itertools.product(TINY, TINY, (1, 2)):
        for dim in (None, 0, 1)[: 1 if tp == 1 else 3]:
            plan = _plan([(rows, cols, dim)], tp, count, config)
            strips = [matrix for matrix in plan.matrices if matrix.strip is not None]
            assert len(strips) in (0, count)
            for home in {matrix.home for matrix in (*strips[:1], *strips[-1:])}:
                _step_of_home(home, strips, plan.size, config)()


# Every setting that takes a number: alone, in a pair or in a triple.
NUMERIC = {
    name: str(hint)
    for name, hint in get_type_hints(MuonConfig).items()
    if re.search(r"\b(int|float)\b", str(hint))
}
ENDS: list[Any] = [0, 1, 2, -1, 0.0, 0.5, 5e-324, 1e-320, 1e-9, 1e9, 2**63]
ENDS += [1.7e308, -1.7e308, 10**400, -(10**400), math.inf, math.nan]


@pytest.mark.parametrize("name", NUMERIC)
def test_any_number_of_a_setting_is_planned_or_refused_by_name(name: str) -> None:
    values = ENDS
    if "tuple[str" in NUMERIC[name]:
        values = [(("*", end),) for end in ENDS]
    elif name == "ns_coefficients":
        values = [
            (2.0, *both)
            for end in ENDS
            for both in ((-1.5, end), (end, 0.5), (end, end))
        ]
    planned = 0
    for value in values:
        try:
            config = MuonConfig(**{name: value, **WITH.get(name, {})})
        except (TypeError, ValueError) as refused:
            assert str(refused).startswith(named(name)), value
            continue
        planned += 1
        for device in get_args(Device):
            _plan([(64, 3, None), (4096, 1024, 0), (700, 900, 1)], 2, 4, config, device)
    assert planned


def test_experts_stay_whole() -> None:
    name = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"
    parameter = whole_parameter(name, (40, 16))
    assert in_strips(parameter, [4]) == parameter
    shared = "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"
    assert len(in_strips(replace(parameter, name=shared), [4]).matrices) == 4


@pytest.mark.parametrize(
    "rows, cols, device, counts",
    [
        (8192, 4096, "cuda", [2, 4, 8, 16]),  # long
        (4096, 28672, "cuda_symmetric", [2, 4, 8, 16]),
        (8000, 4096, "cuda", [4, 8]),
        (8000, 4096, "cuda_symmetric", [4, 8]),  # too small for its kernel
        (8000, 4096, "cuda_triton", []),
        (8000, 4095, "cuda", []),
        (8192, 8192, "cuda", [4, 8]),  # 16 strips are on two nodes
        (8192, 8192, "cuda_symmetric", [4, 8]),  # a kernel makes half a square
        (4096, 4096, "cuda", [4, 8]),
        (4096, 4096, "cuda_triton", []),
    ],
)
def test_what_several_homes_can_share(
    rows: int, cols: int, device: Device, counts: list[int]
) -> None:
    config = MuonConfig(preset="fast")
    # the standard iteration has rows of squares, too
    for own in (config, replace(config, ns_iteration="standard")):
        numerics = Numerics(own, device)
        can = [n for n in (2, 4, 8, 16) if can_share(rows, cols, n, numerics)]
        assert can == counts


def test_auto_shares_nothing_where_experts_fill_the_ranks() -> None:
    """They have homes by what ranks have to do by then, so no rank waits for the dense
    ones'.
    """
    shapes: list[tuple[int, int, int | None]] = [(16384, 4096, None)] * 2
    config = MuonConfig(split_matrices="off")
    whole = _plan(shapes, 1, 8, config)
    numerics = Numerics(replace(config, split_matrices="auto"), "cuda")
    stage = whole.parameters, whole.grid, numerics
    assert len(make_plan(*stage).shared) == 2
    mean = sum(whole.ns_flops()) // 8
    assert len(make_plan(*stage, later=mean // 2).shared) == 2
    assert make_plan(*stage, later=100 * mean).shared == ()


def test_auto_cuts_what_is_more_than_a_share_and_only_that() -> None:
    """Of 8 ranks each has a small matrix, and one the large one."""
    shapes: list[tuple[int, int, int | None]] = [(28672, 4096, None)]
    shapes += [(4096, 2048, None)] * 16
    plan = _plan(shapes, 1, 8, MuonConfig(split_matrices="auto"))
    assert [(one.rows, one.cols) for one in plan.shared] == [(28672, 4096)]


def test_homes_on_several_nodes_take_longer() -> None:
    """Their squares travel over slower links."""
    strip, own = Strip(3000, 1500, 0, 4), 3000 * 1500 // 4
    near, far = (
        strip_time(strip, own, 64, Numerics(MuonConfig(), "cuda"), neighbours)
        for neighbours in (4, 2)
    )
    assert near < far


def _step_of_home(
    home: int, strips: Sequence[Matrix], ranks: int, config: MuonConfig
) -> Callable[[], None]:
    """Newton-Schulz of the strips at ``home`` alone, as ``runtime.round`` calls it."""
    own = [strip for strip in strips if strip.home == home]
    route = partial(collectives.Route.of, None, range(ranks), home)
    sharing = Sharers(strips, home, route, Meter())
    dtype = TORCH_DTYPE[Numerics(config).travels]
    held = [torch.randn(strip.rows, strip.cols).to(dtype) for strip in own]
    moves = torch.ones(len(own), dtype=torch.bool)

    def step() -> None:
        with mock.patch.object(collectives, "start_messages", _received_at_once):
            turned = sharing.rows_to_columns(held) if own[0].comes_as_rows else held
            orthogonalize_strips(
                turned, own[0].whole, moves, numerics_on(moves.device, config), sharing
            )
            if own[0].comes_as_rows:
                sharing.columns_to_rows(turned, held)

    return step


def _received_at_once(
    name: str, sent: Tensor, route: Any
) -> collectives.Pending | None:
    if not route.messages:
        return None
    received = sent.new_zeros(route.received)
    return collectives.Pending(name, route.group, sent, received, [])
