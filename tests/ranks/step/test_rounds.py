"""Rounds of the exchange: bounded, the same result as without, and really beside
compute.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_meters import counted_collectives
from torch.profiler import ProfilerActivity, profile

from figures.llama import llama_8b
from megatron_muon.lab.bench.step.meter import peak_bytes
from megatron_muon.orthogonalize.newton_schulz import orthogonalize
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.plan import make_plan
from megatron_muon.planning.rounds import cut as rounds_cut
from megatron_muon.planning.rounds.cut import make_rounds, smaller_first
from megatron_muon.planning.rounds.table import round_tables
from megatron_muon.runtime import collectives
from megatron_muon.settings.config import MuonConfig
from support.models.gpt import (
    Case,
    Topology,
    check,
    on_ranks,
    start,
    stepped,
    take_step,
    truth,
)
from support.ranks import run
from support.rounds import silent_rounds
from support.runs.topologies import DP3, DP4_EP2, TP2, TP2_DP2, TP2_DP2_EP2_ETP1
from support.runs.whole import differences

CASE = Case(steps=2)
# a fc1 has 98 kB, a projection 11 kB
SMALL = CASE.with_muon(round_bytes=20_000)
ALONE = CASE.with_muon(round_bytes=1)

LOADS = st.dictionaries(st.integers(0, 3), st.integers(1, 50), min_size=1, max_size=4)


def _keep_to(
    limit: int, rounds: tuple[tuple[int, ...], ...], taken: list[dict[int, int]]
) -> None:
    """No rank takes more in a round, unless one parameter does by itself."""
    for round in rounds:
        for rank in range(4):
            of_rank = sum(taken[i].get(rank, 0) for i in round)
            there = [i for i in round if rank in taken[i]]
            assert of_rank <= limit or len(there) == 1


@given(
    st.lists(st.tuples(LOADS, LOADS), max_size=12),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(1, 4),
)
def test_every_parameter_is_in_one_round_within_the_limit(
    loads: list[tuple[dict[int, int], dict[int, int]]], limit: int | None, least: int
) -> None:
    """Also with small ones first. As they come, none waits that could have been in one
    before.
    """
    homed = [one for one, _ in loads]
    taken = [two for _, two in loads]
    for rounds in (
        make_rounds(homed, taken, limit),
        smaller_first(homed, taken, limit, least),
    ):
        assert sorted(index for round in rounds for index in round) == list(
            range(len(loads))
        )
        assert all(rounds)
        if limit is not None:
            _keep_to(limit, rounds, taken)
    assert make_rounds(homed, taken, 12 * 200) == (
        (tuple(range(len(loads))),) if loads else ()
    )
    rounds = make_rounds(homed, taken, limit) if limit is not None else ()
    for number, round in enumerate(rounds):
        for index, before in itertools.product(round, rounds[:number]):
            of_rank = {
                rank: sum(taken[i].get(rank, 0) for i in before) for rank in range(4)
            }
            assert any(
                of_rank[r] and of_rank[r] + n > limit for r, n in taken[index].items()
            )


def test_what_one_rank_has_too_much_of_closes_no_others_round() -> None:
    alone = [{rank: 10} for rank in range(4)]
    assert make_rounds(alone, alone, 5) == ((0, 1, 2, 3),)
    # Rank 0 has a large one and three small ones; the others go on beside them.
    loads = [{0: 10}, {0: 1}, {0: 1}, {0: 1}, {1: 4}, {1: 4}, {2: 5}, {2: 5}]
    assert make_rounds(loads, loads, 5) == ((0, 4, 6), (1, 2, 3, 5, 7))


def test_by_default_a_round_has_room_for_the_largest_parameter_three_times() -> None:
    small, large = {0: 1 << 20}, {0: 300 << 20}
    assert len(make_rounds([small] * 256, [small] * 256, None)) == 1
    assert len(make_rounds([small] * 257, [small] * 257, None)) == 2
    assert make_rounds([large] * 4, [large] * 4, None) == ((0, 1, 2), (3,))
    assert make_rounds([], [], None) == ()


def test_small_matrices_come_first_in_equal_shares_of_every_home() -> None:
    loads = [{0: 10}, {0: 2}, {1: 10}, {1: 2}, {2: 7}]
    assert smaller_first(loads, loads, None, 2) == ((1, 3), (0, 2, 4))
    alike = [{index // 4: 5} for index in range(8)]
    assert smaller_first(alike, alike, None, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_small_matrices_come_first_where_homes_have_much() -> None:
    """Llama-3-8B over 32 ranks; one round stays if it is asked for, or where a home has
    less than ``LEAST_IN_TWO``.
    """
    parameters = llama_8b(32)[0]
    grid = RankGrid(((tuple(range(32)),),))
    config = MuonConfig(split_matrices="off")
    cut = make_plan(parameters, grid, Numerics(config))
    once = replace(config, round_bytes=1 << 62)
    whole = make_plan(parameters, grid, Numerics(once))
    with mock.patch.object(rounds_cut, "LEAST_IN_TWO", 1 << 40):
        few = make_plan(parameters, grid, Numerics(config))
    assert len(whole.rounds) == 1 and few.rounds != cut.rounds
    assert cut.matrices == few.matrices == whole.matrices
    means = [
        statistics.fmean(math.prod(parameters[at].shape) for at in round)
        for round in cut.rounds
    ]
    assert means[0] < means[-1]


@pytest.mark.parametrize("case", [SMALL, ALONE])
@pytest.mark.parametrize("topology", [DP3, TP2_DP2, Topology.of("tp2 pp2 dp2 overlap")])
def test_rounds_change_no_bit(case: Case, topology: Topology) -> None:
    assert differences(truth(CASE), check(case, topology)) == []


@pytest.mark.parametrize("case", [SMALL, ALONE])
def test_rounds_of_experts_change_no_bit(case: Case) -> None:
    moe = replace(case, moe=True)
    assert (
        differences(truth(replace(CASE, moe=True)), check(moe, TP2_DP2_EP2_ETP1)) == []
    )


def _before_a_step(case: Case, topology: Topology) -> Any:
    """An optimizer that has taken a step, with gradients."""
    built = stepped(case, topology, 1)
    megatron = built.part
    for shard in megatron.get_parameters():
        shard.grad = torch.ones_like(shard)
    return megatron


def _counted(case: Case, topology: Topology) -> dict[str, Any]:
    megatron = _before_a_step(case, topology)
    start_messages = mock.patch.object(
        collectives, "start_messages", wraps=collectives.start_messages
    )
    with start_messages as started, counted_collectives() as calls:
        megatron.optimizer.step()
    muon = megatron.muon
    return {
        "started": sum(bool(call.args[2].messages) for call in started.call_args_list),
        "calls": calls,
        "meter": muon.meter.sent_bytes,
        "plan": muon.plan,
    }


@pytest.mark.parametrize("case", [SMALL, ALONE])
def test_rounds_move_the_same_bytes_and_are_silent_where_nothing_moves(
    case: Case,
) -> None:
    for rank, counted in enumerate(on_ranks(_counted, case, DP3)):
        plan = counted["plan"]
        silent = silent_rounds(plan)
        assert len(silent) > 2 and any(silent) and not all(silent), silent
        tables = round_tables(plan.for_rank(rank), plan.matrices)
        gathers = sum(
            bool(table.sent.counts or table.received.counts) for table in tables
        )
        scatters = sum(
            bool(table.results.counts or table.returned.counts) for table in tables
        )
        assert counted["started"] == gathers + scatters <= 2 * silent.count(False)
        sent = sum(sent for _, sent, _ in counted["calls"])
        assert sent == counted["meter"] == plan.sent_bytes()[rank]


def _peak(case: Case, topology: Topology) -> tuple[int, int, int]:
    """(peak of an inner step, of the largest matrix's orthogonalization alone,
    parameters).
    """
    megatron = _before_a_step(case, topology)
    muon, cpu = megatron.muon, torch.device("cpu")
    step = peak_bytes(cpu, megatron.optimizer.step)
    matrices = [
        torch.ones(m.rows, m.cols, dtype=torch.bfloat16) for m in muon.plan.matrices
    ]
    alone = max(
        peak_bytes(cpu, lambda m=m: orthogonalize(m, muon.config)) for m in matrices
    )
    return step, alone, len(muon.plan.rounds)


@pytest.mark.parametrize(
    "limit, topology",
    [
        (60_000, TP2_DP2),
        (90_000, TP2_DP2),
        (60_000, Topology.of("tp2 dp3 overlap")),
        (90_000, Topology.of("dp4 overlap bucket_size20000")),
    ],
)
def test_a_step_needs_two_rounds_and_the_workspace_of_one_matrix(
    limit: int, topology: Topology
) -> None:
    case = replace(CASE, layers=4).with_muon(round_bytes=limit)
    whole = replace(CASE, layers=4)
    for (step, alone, rounds), (without, _, one) in zip(
        on_ranks(_peak, case, topology), on_ranks(_peak, whole, topology), strict=True
    ):
        assert rounds > 2 and one == 1
        assert step <= 2 * limit + alone
        assert without > step, "the bound would hold without rounds"


def _peers(topology: Topology) -> tuple[int, int]:
    """How many it connects to, and with how many it then shares a message."""
    built = start(replace(CASE, moe=True), topology)
    counts = []
    for megatron in built.parts:
        plan, rank = megatron.muon.plan, dist.get_rank(megatron.stage_group)
        shared = set().union(
            *(table.peers for table in round_tables(plan.for_rank(rank), plan.matrices))
        )
        counts.append((megatron.muon.exchange.connect(), len(shared)))
    take_step(built, 0)
    return sum(made for made, _ in counts), sum(shared for _, shared in counts)


def test_connections_are_made_to_the_plans_peers_before_the_first_step() -> None:
    """As on a GPU, whose library makes them in the first message else; here gloo has
    them.
    """
    results = run(_peers, 4, DP4_EP2)
    assert (
        all(made == shared for made, shared in results)
        and sum(m for m, _ in results) > 0
    )


Event = tuple[str, float, float]


def _traced(case: Case, topology: Topology) -> list[Event]:
    """Of a step: what is called, and when it starts and ends in µs."""
    built = stepped(case, topology, 1)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        take_step(built, 1)
    events: list[Any] = sorted(trace.events(), key=lambda event: event.time_range.start)
    times = (
        (event.name, event.time_range.start, event.time_range.end) for event in events
    )
    return [time for time in times if time[0].startswith("muon/")]


def _named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event[0] == name]


def test_neighbours_are_under_way_while_a_round_is_orthogonalized() -> None:
    """Of each round but the first and last, which have one neighbour."""
    for events in on_ranks(_traced, ALONE, TP2):
        work = _named(events, "muon/newton_schulz")
        for half in ("gather", "scatter"):
            starts = _named(events, f"muon/{half}/collective")
            waits = _named(events, f"muon/{half}/wait")
            assert len(work) == len(starts) == len(waits) > 4
            # the gather of round k + 1, the scatter of k - 1
            for number in range(len(work)):
                beside = number + 1 if half == "gather" else number - 1
                if 0 <= beside < len(work):
                    _, begun, ended = work[number]
                    assert starts[beside][2] <= begun and ended <= waits[beside][1]


def test_experts_first_round_is_under_way_before_the_last_dense_scatter_is_waited_for() -> (
    None
):
    """On ranks that share something in it; the others begin it in its turn. Experts are
    on three ranks each, whose shards cut some.
    """
    early = []
    for events in on_ranks(_traced, replace(CASE, moe=True), Topology.of("dp6 ep2")):
        names = [name for name, *_ in events]
        momentum = [at for at, name in enumerate(names) if name == "muon/momentum"]
        early.append(momentum[1] < names.index("muon/update"))
    assert any(early)


def _neighbours() -> int:
    built = start(Case().with_muon(node_ranks=2), Topology.of("dp6 instances2"))
    return int(built.parts[0].muon.plan.grid.neighbours)


def test_instances_have_the_same_plan_where_nodes_cut_them_differently() -> None:
    """Ranks 0 and 1 of the first instance are of one node; of the second one, 1 and
    2.
    """
    assert run(_neighbours, 6) == [1] * 6
