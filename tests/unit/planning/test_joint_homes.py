"""Homes of a stage's dense and expert matrices, balanced together. Plain integers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures.priced_models import DEEPSEEK_V3
from megatron_muon.lab.pricing.memory import peaks
from megatron_muon.lab.pricing.presets import H100
from megatron_muon.lab.pricing.step import price_step
from megatron_muon.lab.pricing.work import Optimizer
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import HOME_SLACK, Work, choose_homes
from megatron_muon.planning.layout import Span
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.rounds.cut import LEAST_LIMIT, LEAST_SCRATCH
from megatron_muon.settings.config import MuonConfig
from support.rounds import silent_rounds
from support.sections import whole_parameter
from support.virtual_gpu.plans import OVERLAP, Model, plans_of

STAGE = Model("DeepSeek-V3", f"{DEEPSEEK_V3}{OVERLAP}--world-size 1024", stage=1)
CONFIG = MuonConfig()


Planned = tuple[MuonConfig, list[ExchangePlan], list[ExchangePlan]]


@pytest.fixture(scope="module")
def deepseek() -> Planned:
    """The settings, the plans of 64 ranks of DeepSeek-V3, and those that each makes by
    itself.
    """
    config, named = plans_of(STAGE)
    plans = [plan for _, plan in named]
    assert not plans[0].shared  # since experts fill the ranks
    whole = replace(config, split_matrices="off")
    alone = [make_plan(plan.parameters, plan.grid, Numerics(whole)) for plan in plans]
    return config, plans, alone


def _busiest_over_mean(plans: list[ExchangePlan]) -> float:
    flops = [
        sum(of_rank)
        for of_rank in zip(*(plan.ns_flops() for plan in plans), strict=True)
    ]
    return max(flops) * len(flops) / sum(flops)


def test_deepseek_v3s_busiest_rank_has_at_most_11_tenths_of_the_mean(
    deepseek: Planned,
) -> None:
    _, plans, alone = deepseek
    assert _busiest_over_mean(plans) <= 1.1 < 1.25 < _busiest_over_mean(alone)
    assert plans[0] == alone[0]  # experts give way, since there are many of them


def test_deepseek_v3s_step_is_shorter_and_keeps_to_the_memory_of_its_rounds(
    deepseek: Planned,
) -> None:
    config, plans, alone = deepseek
    together, apart = (
        price_step(
            [Optimizer(plan, (0,) * plan.size) for plan in each], config, H100
        ).seconds
        for each in (plans, alone)
    )
    assert together <= 0.95 * apart
    assert max(peaks(plans, config)) <= 2 * LEAST_LIMIT + 2 * LEAST_SCRATCH


def test_rounds_in_which_nothing_travels_come_first(
    deepseek: Planned,
) -> None:
    silent = silent_rounds(deepseek[1][1])
    assert set(silent) == {True, False}
    assert silent == sorted(silent, reverse=True)


def test_what_a_rank_cannot_keep_stays_among_its_neighbours(
    deepseek: Planned,
) -> None:
    experts = deepseek[1][1]
    moved = [
        (segment.rank, experts.matrices[segment.matrix].home)
        for segment in experts.slices
        if segment.rank != experts.matrices[segment.matrix].home
    ]
    assert moved
    assert all(holder // 8 == home // 8 for holder, home in moved)


Stage = tuple[list[Work], list[Work], int]


@st.composite
def stages(draw: st.DrawFn) -> Stage:
    """Dense matrices, experts' matrices, and the number of ranks."""
    size = draw(st.integers(1, 20))
    held = st.dictionaries(
        st.integers(0, size - 1), st.integers(1, 30), min_size=1, max_size=3
    )

    def some(most: int) -> list[Work]:
        drawn = draw(
            st.lists(st.tuples(st.integers(1, most), held), min_size=1, max_size=30)
        )
        return [Work(flops, sum(by_rank.values()), by_rank) for flops, by_rank in drawn]

    return some(1000), some(30), size


def _after(works: list[Work], homes: list[int], before: list[int]) -> list[int]:
    flops = list(before)
    for work, home in zip(works, homes, strict=True):
        flops[home] += work.flops
    return flops


@given(stages())
def test_no_rank_gets_experts_past_the_slack_of_all_work(
    stage: Stage,
) -> None:
    dense, experts, size = stage
    before = _after(dense, choose_homes(dense, size, "balanced"), [0] * size)
    homes = choose_homes(experts, size, "balanced", before=before)
    after = _after(experts, homes, before)
    mean = Fraction(sum(after), size)
    largest = max(work.flops for work in experts)
    most = max(HOME_SLACK * max(mean, largest), mean + largest)
    for rank in set(homes):
        assert after[rank] <= most


@given(stages())
def test_local_homes_hold_most_whatever_else_their_rank_does(
    stage: Stage,
) -> None:
    dense, experts, size = stage
    before = _after(dense, choose_homes(dense, size, "local"), [0] * size)
    homes = choose_homes(experts, size, "local", before=before)
    for work, home in zip(experts, homes, strict=True):
        assert work.held[home] == max(work.held.values())


# --- two small optimizers -------------------------------------------------------------

RANKS = 4


def _dense() -> ExchangePlan:
    """One matrix, all of it on rank 1."""
    parameter = whole_parameter("dense", (64, 64), start=4096, bucket=Span(0, 16384))
    return make_plan([parameter], RankGrid(((tuple(range(RANKS)),),)), Numerics(CONFIG))


def _experts(*earlier: ExchangePlan, config: MuonConfig = CONFIG) -> ExchangePlan:
    """Four matrices on each of four EP ranks, all of them on that rank."""
    bucket = Span(0, 8192)
    parameters = []
    for at in range(4 * RANKS):
        start = at % 4 * 2048
        own = whole_parameter(f"experts.{at}", (32, 64), start=start, bucket=bucket)
        parameters.append(replace(own, ep_rank=at // 4))
    grid = RankGrid(tuple(((rank,),) for rank in range(RANKS)))
    return make_plan(parameters, grid, Numerics(config, "cuda"), earlier)


def test_experts_leave_the_rank_that_has_the_dense_matrix() -> None:
    dense = _dense()
    alone = _experts()
    assert [matrix.home for matrix in alone.matrices] == [
        at // 4 for at in range(4 * RANKS)
    ]
    together = _experts(dense)
    kept = [at for at, matrix in enumerate(together.matrices) if matrix.home == at // 4]
    left = set(range(4 * RANKS)) - set(kept)
    assert left and left <= {4, 5, 6, 7}
    assert _busiest_over_mean([dense, together]) < _busiest_over_mean([dense, alone])
    local = _experts(dense, config=replace(CONFIG, homes="local"))
    assert local.matrices == alone.matrices


def test_no_round_takes_more_than_it_may_where_an_expert_travels() -> None:
    dense = _dense()
    for round_bytes in (1, 4096, 12_288, 1 << 20):
        plan = _experts(dense, config=replace(CONFIG, round_bytes=round_bytes))
        assert sorted(at for round in plan.rounds for at in round) == list(
            range(4 * RANKS)
        )
        for round, silent in zip(plan.rounds, silent_rounds(plan), strict=True):
            staged = [0] * RANKS
            for matrix in (plan.matrices[at] for at in round):
                staged[matrix.home] += matrix.numel * plan.itemsize
            most = round_bytes * Fraction(4 if silent else 2, 3)
            # a parameter that takes more is alone on its rank
            one = 32 * 64 * plan.itemsize
            assert max(staged) <= max(most, one)


def test_plans_of_other_ranks_are_refused() -> None:
    dense = _dense()
    grid = RankGrid(((tuple(range(2)),),))
    parameter = replace(dense.parameters[0], bucket=Span(0, 2 * 8192))
    with pytest.raises(ValueError, match="have its 2 ranks, not 4"):
        make_plan([parameter], grid, Numerics(CONFIG, "cuda"), [dense])
