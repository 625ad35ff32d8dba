"""The order of a step: the engine's own, and what it promises."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.planning.schedule import ADAMW, Event, step_events
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.states import States
from megatron_muon.runtime.tracing import phases

Done = tuple[str, int, int]
# of each optimizer, whether a rank has a message in each of its rounds
STEPS = st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=3)


def _round(optimizer: int, number: int, travels: bool, done: list[Done]) -> Any:
    """Stands for a ``runtime.round.Round``; notes what the engine asks of it."""

    def note(action: str, *_: object) -> None:
        done.append((action, optimizer, number))

    return SimpleNamespace(
        travels=travels,
        homes=(),
        start=partial(note, "start"),
        finish_gather=lambda: note("assemble") or number,
        work=partial(note, "orthogonalize"),
        start_scatter=partial(note, "scatter"),
        finish=partial(note, "update"),
    )


def _engine(optimizer: int, travels: Sequence[bool], done: list[Done]) -> Engine:
    names: Any = SimpleNamespace(after_scatter="update")
    rule: Any = SimpleNamespace(
        names=names, state_keys=(), asks=False, counts_steps=False
    )
    plan: Any = SimpleNamespace(matrices=())
    own: Any = SimpleNamespace(shards={})
    exchange: Any = SimpleNamespace(
        own=own, rounds=(), device=torch.device("cpu"), meter=Meter()
    )
    engine = Engine(rule, plan, exchange, {}, phases())
    engine.rounds = [
        _round(optimizer, number, there, done) for number, there in enumerate(travels)
    ]
    return engine


@given(STEPS)
def test_the_engine_steps_in_the_order_of_the_schedule(
    steps: list[list[bool]],
) -> None:
    """Also where one optimizer begins the step of the next one."""
    done: list[Done] = []
    states = States(SimpleNamespace(state={}))
    engines = [_engine(at, travels, done) for at, travels in enumerate(steps)]
    for engine, following in itertools.pairwise(engines):
        engine.start_next = partial(following.start, [], states, works=True)
    for at, engine in enumerate(engines):
        engine.step([], states, partial(done.append, ("adamw", at, ADAMW)))
    assert done == [
        event[:3]
        for event in step_events(list(map(len, steps)))
        if event.round == ADAMW or event.is_for(steps[event.optimizer][event.round])
    ]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_every_rank_has_each_event_of_a_round_once_in_order(
    counts: list[int],
) -> None:
    events = list(step_events(counts))
    actions = "start assemble orthogonalize scatter update".split()
    for travels in (True, False):
        own = [event for event in events if event.is_for(travels)]
        for optimizer, count in enumerate(counts):
            for number in range(count):
                mine = [e for e in own if e[1:3] == (optimizer, number)]
                assert [event.action for event in mine] == actions
    adamws = [event for event in events if event.action == "adamw"]
    assert adamws == [Event("adamw", at, ADAMW) for at in range(len(counts))]
