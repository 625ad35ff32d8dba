"""Wrong plans and wrong models, as context managers that ``gpt.train`` enters on every
rank.

Nothing raises an error in such a run; only its result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock


def _planned_by(change: Callable[..., Any]) -> Any:
    """Within it plans are ``change(make_plan, parameters, grid, *more)``."""
    from megatron_muon.planning import plan

    return mock.patch.object(plan, "make_plan", partial(change, plan.make_plan))


def _with_segments(plan: Any, segments: list[Any]) -> Any:
    changed = replace(plan, slices=tuple(segments))
    changed.validate()
    return changed


def wrong_piece() -> AbstractContextManager[None]:
    """Two pieces of one parameter, equally long, on one rank, go to each other's place:
    the plan still covers every element once, and its own check accepts it.
    """

    def change(make_plan: Any, *stage: Any) -> Any:
        plan = make_plan(*stage)
        segments = list(plan.slices)
        for a, one in enumerate(segments):
            for b in range(a + 1, len(segments)):
                two = segments[b]
                same = (one.parameter, one.rank, one.elements.size)
                if same == (two.parameter, two.rank, two.elements.size):
                    segments[a] = replace(one, matrix=two.matrix, start=two.start)
                    segments[b] = replace(two, matrix=one.matrix, start=one.start)
                    return _with_segments(plan, segments)
        raise AssertionError("the plan has no two pieces to swap")

    return _planned_by(change)


def swapped_tp_order() -> AbstractContextManager[None]:
    """Every rank takes its TP slice for the other TP rank's."""

    def change(make_plan: Any, parameters: Any, grid: Any, *more: Any) -> Any:
        ranks = tuple(plane[::-1] for plane in grid.ranks)
        return make_plan(parameters, replace(grid, ranks=ranks), *more)

    return _planned_by(change)


def swapped_ep_ranks() -> AbstractContextManager[None]:
    """The first rank that has a part of EP rank 0's experts and the first one of EP
    rank 1's send them to each other's matrices, while the ranks with the other parts do
    not.
    """

    def change(make_plan: Any, parameters: Any, grid: Any, *more: Any) -> Any:
        plan = make_plan(parameters, grid, *more)
        if not any(".experts." in parameter.name for parameter in parameters):
            return plan
        (first, *others), *_ = grid.ranks[0]
        second = grid.ranks[1][0][0]
        assert others or grid.tp_size > 1, (
            "one rank has all of an expert: renaming changes nothing"
        )
        count = len(plan.parameters) // grid.ep_size
        place = {
            (s.rank, s.parameter % count, s.elements.start, s.start): index
            for index, s in enumerate(plan.slices)
            if s.rank in (first, second)
        }
        segments = list(plan.slices)
        for (rank, *rest), index in place.items():
            other = plan.slices[place[(second if rank == first else first, *rest)]]
            segments[index] = replace(segments[index], matrix=other.matrix)
        return _with_segments(plan, segments)

    return _planned_by(change)


@contextmanager
def believed_marks() -> Iterator[None]:
    """Duplicated linears do not tell that they are: the marks on their weights are
    believed.
    """
    from support.models import te_standin

    original = te_standin.TELinear.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        del self.parallel_mode

    with mock.patch.object(te_standin.TELinear, "__init__", init):
        yield
