"""The rounds of a stage: what a round counts of its memory, and the shorter of two ways
to cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.homes import Price, Work, prices
from megatron_muon.planning.rounds.cut import (
    ROUND_PS,
    Loads,
    make_rounds,
    smaller_first,
)
from megatron_muon.planning.rounds.pipeline import Demand, pipeline_time
from megatron_muon.planning.slices import Matrix

_Rounds = tuple[tuple[int, ...], ...]


def stage_rounds(
    owner: Sequence[int],
    matrices: Sequence[Matrix],
    works: Sequence[Work],
    size: int,
    numerics: Numerics,
) -> _Rounds:
    """Rounds that keep to ``round_bytes``, where two rounds use memory at a time.

    If all rounds are alike, a home has at most three copies of a matrix: the one that
    is orthogonalized, the message that it comes in and the one that it goes in. Another
    rank has two copies of a slice. So in each of two rounds a matrix counts 3/2 at its
    home, a slice 1.

    Where every matrix lies whole on one rank, as with an expert DP of 1, most stay
    there. If nothing travels in a round or its neighbours, a home has one copy: a
    matrix counts 1/2. Those rounds come first, so a rank that has more to do for
    another optimizer, and gives matrices away for that, is as far as the others when
    these travel. The last of them shares memory with slices that arrive, which take 2/3
    of what a round may: if anything travels, a matrix that stays counts 3/4.

    Args:
        owner: index of each matrix's parameter, in order; every parameter has a matrix.
        matrices, works: of the stage, in the same order, with the homes that were
            chosen.
        size: number of ranks in the stage.
        numerics: ``round_bytes``, ``rank_tflops`` and ``link_gbytes`` are read.

    Returns:
        Indices of parameters per round.
    """
    count, itemsize = owner[-1] + 1 if owner else 0, numerics.itemsize
    every = list(zip(owner, matrices, works, strict=True))
    travels = {
        index for index, matrix, work in every if set(work.held) != {matrix.home}
    }
    if any(len(work.held) > 1 for work in works):
        travels = set(range(count))
    homed: list[dict[int, int]] = [defaultdict(int) for _ in range(count)]
    taken: list[dict[int, int]] = [defaultdict(int) for _ in range(count)]
    for index, matrix, work in every:
        homed[index][matrix.home] += matrix.numel * itemsize
        for rank, elements in work.held.items():
            if rank != matrix.home:
                taken[index][rank] += elements * itemsize
        quarters = 3 if travels else 2
        if index in travels:
            quarters = 6
        taken[index][matrix.home] += -(-quarters * matrix.numel * itemsize // 4)

    def cut(
        some: Sequence[int], demands: Sequence[Demand] | None
    ) -> list[tuple[int, ...]]:
        loads = [homed[index] for index in some], [taken[index] for index in some]
        if demands is None:
            made = make_rounds(*loads, numerics.config.round_bytes)
        else:
            made = _shorter(*loads, [demands[index] for index in some], size, numerics)
        return [tuple(some[at] for at in round) for round in made]

    # The homes of a shared matrix wait for each other, so all of them come at once.
    may_choose = numerics.config.round_bytes is None and all(
        matrix.strip is None for matrix in matrices
    )
    demands = _demands(owner, matrices, works, prices(numerics)) if may_choose else None
    stay = [index for index in range(count) if index not in travels]
    return (*cut(stay, None), *cut(sorted(travels), demands))


def _shorter(
    homed: Sequence[Loads],
    taken: Sequence[Loads],
    demands: Sequence[Demand],
    size: int,
    numerics: Numerics,
) -> _Rounds:
    """As few rounds as fit, or at least two with small matrices first, if that ends
    sooner.
    """
    few = make_rounds(homed, taken, None)
    other = smaller_first(homed, taken, None, max(2, len(few)))
    price = prices(numerics)
    more = (len(other) - len(few)) * ROUND_PS * numerics.config.rank_tflops * price.flop
    is_shorter = pipeline_time(other, demands, size) + more < pipeline_time(
        few, demands, size
    )
    return other if is_shorter else few


def _demands(
    owner: Sequence[int],
    matrices: Sequence[Matrix],
    works: Sequence[Work],
    price: Price,
) -> list[Demand]:
    """What each parameter asks of its homes and of links."""
    count = owner[-1] + 1 if owner else 0
    of_homes: list[dict[int, int]] = [defaultdict(int) for _ in range(count)]
    slices: list[dict[tuple[int, int], int]] = [defaultdict(int) for _ in range(count)]
    for index, matrix, work in zip(owner, matrices, works, strict=True):
        of_homes[index][matrix.home] += work.flops * price.flop
        for rank, elements in work.held.items():
            if rank != matrix.home:
                slices[index][rank, matrix.home] += elements * price.element
    return [Demand(*both) for both in zip(of_homes, slices, strict=True)]
