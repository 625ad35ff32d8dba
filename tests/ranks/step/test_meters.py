"""Bytes and flops, counted from outside, equal the meters and the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from megatron_muon.lab.pricing.work import traffic_of
from megatron_muon.planning.sharing.strips import SharedMatrix
from support.models.gpt import (
    Case,
    Topology,
    on_ranks,
    prepare_step,
    start,
    stepped,
    take_step,
)
from support.rounds import silent_rounds
from support.runs.topologies import (
    DP3,
    DP4_EP2,
    DP4_EP4,
    ONE,
    TP2_CP2,
    TP2_DP2,
    TP2_DP2_EP2,
    TP2_DP2_OVERLAP,
    TP2_EP2_ETP1,
    TP2_PP2_DP2,
)
from support.small_squares import rows_of_small_squares

CASE = Case(steps=2)
MOE = Case(steps=2, moe=True)
# Two large dense matrices on two of four ranks, which give experts away for them.
FEW_DENSE = ("*.linear_proj.weight", "*.router.weight", "*.shared_experts.*")
GIVEN_AWAY = MOE.with_muon(split_qkv=False, muon_exclude=FEW_DENSE)
RUNS = [
    (CASE, ONE),
    (CASE, DP3),
    (CASE, TP2_DP2),
    (CASE, TP2_DP2_OVERLAP),
    (CASE, TP2_PP2_DP2),
    (CASE, TP2_CP2),
    (CASE, Topology.of("dp6 instances2")),
    (Case(layers=4, steps=2), Topology.of("pp2 chunks2")),
    (MOE, TP2_EP2_ETP1),
    (MOE, Topology.of("tp2 dp2 sp ep2 etp1 instances2")),
    (Case(steps=2, moe=True, grouped="legacy"), DP4_EP2),
    (GIVEN_AWAY, DP4_EP4),
    (GIVEN_AWAY.with_muon(round_bytes=1 << 14), DP4_EP4),
    (Case(steps=2, mla="duplicated"), TP2_DP2),
    (CASE.with_muon(ns_iteration="gram"), TP2_DP2),
    (CASE.with_muon(split_matrices=2), TP2_DP2),
    (replace(CASE, ffn=264).with_muon(split_matrices=5), TP2_DP2),
    (CASE.with_muon(split_matrices=4, ns_iteration="gram"), DP3),
    (MOE.with_muon(ns_iteration="auto", ns_dtype="fp16"), TP2_EP2_ETP1),
]


SENDS = {"isend", "irecv"}  # what an exchange over gloo is made of


@contextmanager
def counted_collectives() -> Iterator[list[tuple[str, int, int]]]:
    """Every call of torch.distributed: (name, bytes of the input to other ranks, group
    size).
    """
    calls: list[tuple[str, int, int]] = []
    originals = {}

    def count(name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            size = dist.get_world_size(group)
            rank = dist.get_rank(group)
            sent = 0
            if name == "isend":
                out, target = args
                assert dist.get_group_rank(group, target) != rank, (
                    "what is home must not move"
                )
                assert out.numel(), "ranks send only where there are bytes"
                sent = out.nbytes
            calls.append((name, sent, size))
            return original(*args, **kwargs)

        return counted

    starts = tuple("all_ reduce broadcast barrier new_ batch_ gather scatter".split())
    names = [
        n for n in dir(dist) if n.startswith(starts) and callable(getattr(dist, n))
    ]
    names += "send recv isend irecv".split()
    for name in names:
        originals[name] = getattr(dist, name)
        setattr(dist, name, count(name, originals[name]))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _step_counted(case: Case, topology: Topology) -> dict[str, Any]:
    """Two steps with everything counted; the inner step alone, so that all of it is
    Muon's.
    """
    import megatron_muon

    built = stepped(case, topology, 1)
    megatrons = built.parts
    take_step(built, 1)  # leaves the meter of a whole step
    whole_step = megatron_muon.meter(built.optimizer)
    for megatron in megatrons:
        for shard in megatron.get_parameters():
            shard.grad = torch.ones_like(shard)
    with counted_collectives() as calls, FlopCounterMode(display=False) as flops:
        for megatron in megatrons:
            megatron.optimizer.step()
    meter = megatron_muon.meter(built.optimizer)
    plans = [megatron.muon.plan for megatron in megatrons]
    rank = dist.get_rank(megatrons[0].stage_group)
    planned = [traffic_of([plan], [0] * plan.size) for plan in plans]
    states = [_state_bytes(megatron) for megatron in megatrons]
    return {
        "steps": meter.steps,
        "calls": calls,
        "flops": flops.get_total_flops(),
        "meter": (meter.matrices, meter.ns_flops, meter.sent_bytes),
        "whole_step": (whole_step.matrices, whole_step.ns_flops, whole_step.sent_bytes),
        "plan": (
            sum(len(plan.for_rank(rank).homes) for plan in plans),
            sum(plan.ns_flops()[rank] for plan in plans),
            sum(plan.sent_bytes()[rank] for plan in plans),
        ),
        "planned": (
            sum(one.sent[rank] for one in planned),
            sum(one.messages[rank] for one in planned),
        ),
        "travel": [False in silent_rounds(plan) for plan in plans],
        "stage_matrices": sum(len(plan.matrices) for plan in plans),
        "state": tuple(map(sum, zip(*states, strict=True))),
        "shared": sum(_messages(one) for plan in plans for one in plan.shared),
        "stage": (built.pp_rank, megatrons[0].distributed_optimizer_instance_id),
        "optimizers": len(megatrons),
    }


def _messages(shared: SharedMatrix) -> int:
    """How often the homes of a matrix send messages."""
    squares = 2 * len(shared.gathers) + sum(shared.gathers)
    return 2 * bool(shared.row_itemsize) + 2 + squares


def _state_bytes(megatron: Any) -> tuple[int, int, int, int]:
    """(Muon elements, their bytes, AdamW elements, their bytes): main parameters and
    state.
    """
    totals = [0, 0, 0, 0]
    for shard in megatron.get_parameters():
        state = [
            t for t in megatron.optimizer.state[shard].values() if torch.is_tensor(t)
        ]
        at = 0 if megatron.muon.owns(shard) else 2
        totals[at] += shard.numel()
        totals[at + 1] += shard.nbytes + sum(tensor.nbytes for tensor in state)
    return tuple(totals)


def _first_step(case: Case, topology: Topology) -> tuple[list[str], bool]:
    """Every collective of a run's first optimizer step, Megatron's own with them; and
    whether all ranks of a group that messages travel in have met in it before.
    """
    with counted_collectives() as before:
        built = start(case, topology)
    prepare_step(built, 0)
    with counted_collectives() as calls:
        built.optimizer.step()
    met = {size for name, _, size in before if name == "all_gather"}
    return [n for n, _, _ in calls], met >= {
        size for name, _, size in calls if name in SENDS
    }


@pytest.mark.parametrize(
    "case, topology",
    [
        (CASE, DP3),
        (CASE, TP2_PP2_DP2),
        (CASE, Topology.of("dp6 instances2")),
        (MOE, TP2_DP2_EP2),
    ],
)
def test_the_first_step_makes_no_group_and_gathers_no_object(
    case: Case, topology: Topology
) -> None:
    """Communicators exist before it, and all ranks call the same collectives in one
    order.
    """
    every, met = zip(*on_ranks(_first_step, case, topology), strict=True)
    assert all(met)
    for names in every:
        assert not [n for n in names if "object" in n or n in ("new_group", "barrier")]
    assert sum(names.count("isend") for names in every) > 0
    together = [[name for name in names if name not in SENDS] for names in every]
    assert all(names == together[0] for names in together)


def _rows_counted(case: Case, topology: Topology) -> dict[str, Any]:
    """Of homes that make rows of squares, which small matrices have none of by
    themselves.
    """
    with rows_of_small_squares():
        return _step_counted(case, topology)


_STEPS = [(_step_counted, *one) for one in RUNS]
_STEPS += [
    (_rows_counted, *one) for one in RUNS if ("ns_iteration", "gram") in one[0].muon
]


@pytest.fixture(
    scope="module", params=_STEPS, ids=lambda run: f"{run[0].__name__[1:5]}-{run[2]}"
)
def counted(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    step, case, topology = request.param
    return on_ranks(step, case, topology)


def test_bytes_on_the_wire_are_the_meters_the_plans_and_those_that_plan_prints(
    counted: list[dict[str, Any]],
) -> None:
    for rank in counted:
        sends = [sent for name, sent, _ in rank["calls"] if name == "isend"]
        assert sum(sends) == rank["meter"][2] == rank["plan"][2]
        assert (sum(sends), len(sends)) == rank["planned"]
    several = len(counted) > 2
    assert not several or sum(rank["meter"][2] for rank in counted) > 0


def test_experts_travel_where_only_dense_matrices_do_by_themselves() -> None:
    """What the rows with ``GIVEN_AWAY`` rest on: an expert is whole on its rank."""
    for case, travel in ((MOE, [True, False]), (GIVEN_AWAY, [True, True])):
        every = on_ranks(_step_counted, case, DP4_EP4)
        assert [rank["travel"] for rank in every] == [travel] * 4
    work = [rank["plan"][1] for rank in every]
    assert max(work) <= 1.1 * sum(work) / 4


def test_the_inner_step_calls_nothing_but_the_exchange(
    counted: list[dict[str, Any]],
) -> None:
    """There and back over the stage, at most once to each other rank; no object, no
    world.
    """
    for rank in counted:
        names = [name for name, _, _ in rank["calls"]]
        assert set(names) <= SENDS
        others = max((size for _, _, size in rank["calls"]), default=1) - 1
        # two to turn it, two of numbers, two for each sum, gathers
        shared = rank["shared"]
        assert names.count("isend") <= (2 * rank["optimizers"] + shared) * others
    if len(counted) > 2:
        assert any(rank["calls"] for rank in counted)


def test_flops_are_torchs_count_and_every_matrix_is_done_once(
    counted: list[dict[str, Any]],
) -> None:
    for rank in counted:
        assert rank["flops"] == rank["meter"][1] == rank["plan"][1]
        # which is of one step
        assert rank["steps"] == 3 and rank["whole_step"] == rank["meter"]
    for stage in {rank["stage"] for rank in counted}:
        ranks = [rank for rank in counted if rank["stage"] == stage]
        assert sum(rank["meter"][0] for rank in ranks) == ranks[0]["stage_matrices"]
        assert all(rank["meter"][0] == rank["plan"][0] for rank in ranks)


def test_state_is_8_bytes_per_muon_element_and_12_per_adamw_element(
    counted: list[dict[str, Any]],
) -> None:
    totals = [sum(rank["state"][i] for rank in counted) for i in range(4)]
    assert totals[1] == 8 * totals[0] > 0
    assert totals[3] == 12 * totals[2] > 0
    for rank in counted:
        elements, muon_bytes, others, adamw_bytes = rank["state"]
        assert (muon_bytes, adamw_bytes) == (8 * elements, 12 * others)
