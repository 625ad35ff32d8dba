"""What is chosen for the matrices of a stage: their strips, homes and rounds.

Of six numbers of strips the clock takes the one whose step is shortest; homes follow by
work (``homes``), rounds are as few as fit (``rounds.cut``). Plain integers, the same on
every rank and restart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain
from typing import NamedTuple

from megatron_muon.orthogonalize.iteration import ns_flops, strip_flops
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.clock import Links, clocked, step_times
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import HOME_SLACK, Work, choose_homes
from megatron_muon.planning.layout import Matrix, Parameter
from megatron_muon.planning.rounds.cut import Rounds, rounds_of
from megatron_muon.planning.sharing.strip_time import strip_time
from megatron_muon.planning.sharing.strips import can_share, in_strips, strip_homes
from megatron_muon.planning.slices import held_elements
from megatron_muon.settings.run import NODE

# Flops of Newton-Schulz below which a matrix is not shared by itself: whole, it takes
# less than a seventh of what its homes wait for each other.
LEAST_SHARED = 20_000_000_000
# Strips that gain less are not worth other bits: the clock is within some 7 % of the
# time model without experts, and further off with them.
_LEAST_GAIN = Fraction(5, 100)
# Work of a matrix for each of its strips, in shares of a rank of all work. Smaller
# strips are even, but squares take longer: with one share in place of 3/2 Llama-3-8B at
# TP 2 takes 11.0 ms on 256 GPUs, not 8.9.
_SHARES = Fraction(3, 2), Fraction(1, 2)
# A matrix that leaves its rank for another's travels there and back, between nodes in
# 1.6 to 2.4 times its own Newton-Schulz by the same model, of 2,048 x 7,168 without and
# with a kernel.
_LEAVES = 2


Counts = Mapping[Matrix, int]  # strips of the matrices of a kind; others are whole


class Choice(NamedTuple):
    """Homes and rounds of matrices."""

    works: Sequence[Work]
    homes: Sequence[int]
    rounds: Rounds


class Cut(NamedTuple):
    """Parameters, with shared matrices in strips, and the work of all their
    matrices.
    """

    parameters: Sequence[Parameter]
    works: Sequence[Work]


def _kind(shape: Matrix) -> Matrix:
    """What matrices that get as many strips have in common."""
    return replace(shape, name="")


def flops_of_matrix(shape: Matrix, numerics: Numerics) -> int:
    """Newton-Schulz flops of a matrix, or of a strip at its home."""
    numerics = numerics.where(shape.own)
    strip = shape.strip
    if strip is None:
        return shape.units * ns_flops(*shape.unit, numerics)
    place = {"number": strip.number, "count": strip.count}
    return strip_flops(strip.rows, strip.cols, strip.long.size, numerics, **place)


def flops_of(parameters: Sequence[Parameter], numerics: Numerics) -> int:
    """Newton-Schulz flops of all their matrices."""
    matrices = chain.from_iterable(each.matrices for each in parameters)
    return sum(flops_of_matrix(matrix, numerics) for matrix in matrices)


class Stage:
    """The ranks of a stage, and their other optimizers.

    Args:
        grid: its ranks.
        numerics: of the run; with it ``homes``, ``split_matrices`` and ``round_bytes``.
        earlier: what was chosen for the optimizers that step before.
        later: flops of those that step after. They have homes by what ranks have to do
            by then.

    Attributes:
        before: what each rank has to do for earlier optimizers, in flops.
    """

    def __init__(
        self,
        grid: RankGrid,
        numerics: Numerics,
        earlier: Sequence[Choice] = (),
        later: int = 0,
    ) -> None:
        self.grid, self.numerics, self.later = grid, numerics, later
        self.before = [0] * grid.size
        for choice in earlier:
            for work, home in zip(choice.works, choice.homes, strict=True):
                self.before[home] += work.load
        self._links = Links(grid.size, grid.neighbours, numerics.itemsize)
        self._begun = [clocked(*choice, self._links) for choice in earlier]

    def choose(
        self, parameters: Sequence[Parameter]
    ) -> tuple[Sequence[Parameter], Choice]:
        """The parameters with shared matrices in strips, and what is chosen for
        them.
        """
        cut = self._cut(parameters)
        homes = self._homes(cut)
        rounds = rounds_of(cut.works, homes, self.numerics)
        return cut.parameters, Choice(cut.works, homes, rounds)

    def _cut(self, parameters: Sequence[Parameter]) -> Cut:
        """The parameters with shared matrices cut."""
        split = self.numerics.split

        @cache
        def cut(index: int, counts: tuple[int, ...]) -> tuple[Parameter, list[Work]]:
            """A parameter with each matrix in so many strips."""
            made = in_strips(parameters[index], counts)
            return made, self._works(made, index)

        def cut_all(counts: Counts, others: int = 1) -> Cut:
            cuts = []
            for index, parameter in enumerate(parameters):
                wanted = (counts.get(_kind(m), others) for m in parameter.matrices)
                possible = map(self._possible, parameter.matrices, wanted)
                cuts.append(cut(index, tuple(possible)))
            works = chain.from_iterable(works for _, works in cuts)
            return Cut([parameter for parameter, _ in cuts], list(works))

        def timed(counts: Counts) -> int:
            return self._in_one_round(cut_all(counts))

        if split != "auto":
            return cut_all({}, 1 if split == "off" else split)
        return cut_all(self._counts(parameters, timed))

    def _counts(
        self, parameters: Sequence[Parameter], timed: Callable[[Counts], int]
    ) -> Counts:
        """The numbers of strips with which a step is shortest: none, 2, 4 or 8 for each
        large matrix, or as many as its work takes, and of these only what gains.
        """
        large = self._large(parameters)
        if not large:
            return {}
        work = sum(self.before) + self.later + flops_of(parameters, self.numerics)
        size = self.grid.size
        most = 1 << (min(NODE, size).bit_length() - 1)
        tried: list[Counts] = [
            dict.fromkeys(large, count) for count in (2, 4, 8) if count <= most
        ]
        for shares in _SHARES:
            share = shares * work / size
            tried.append({kind: self._strips(kind, share, most) for kind in large})
        best: Counts = {}
        least: Fraction | int = timed(best) * (1 - _LEAST_GAIN)
        for counts in tried:
            time = timed(counts)
            for kind in large:  # what gains nothing stays whole
                others = {**counts, kind: 1}
                without = timed(others)
                if without <= time:
                    counts, time = others, without
            if time < least:
                best, least = counts, time
        return best

    def _large(self, parameters: Sequence[Parameter]) -> list[Matrix]:
        """The kinds of matrices that gain by being shared by themselves."""
        kinds: dict[Matrix, None] = {}
        for parameter in parameters:
            counts = [2] * len(parameter.matrices)
            if in_strips(parameter, counts) is not parameter:
                kinds |= dict.fromkeys(map(_kind, parameter.matrices))
        return [
            kind
            for kind in kinds
            if ns_flops(*kind.unit, self.numerics.where(kind.own)) >= LEAST_SHARED
        ]

    def _strips(self, kind: Matrix, share: Fraction, most: int) -> int:
        """The least power of two that a kind has no more such shares than, or
        ``most``.
        """
        count = math.ceil(flops_of_matrix(kind, self.numerics) / share)
        return min(1 << (count - 1).bit_length(), most)

    def _possible(self, shape: Matrix, count: int) -> int:
        numerics = self.numerics.where(shape.own)
        can = count > 1 and can_share(shape.rows, shape.cols, count, numerics)
        return count if can else 1

    def _homes(self, cut: Cut) -> Sequence[int]:
        """The home of each matrix by work."""
        strips = [shape.strip for each in cut.parameters for shape in each.matrices]
        chosen = strip_homes(strips, cut.works, self.before)
        ranks = self.before, self.grid.neighbours
        policy = self.numerics.config.homes
        return choose_homes(cut.works, self.grid.size, policy, chosen, *ranks)

    def _works(self, parameter: Parameter, index: int) -> list[Work]:
        """The work of each matrix of a parameter, which has this index."""
        grid, numerics = self.grid, self.numerics
        works = []
        held = held_elements(parameter, grid)
        for shape, by_rank in zip(parameter.matrices, held, strict=True):
            flops, numel = flops_of_matrix(shape, numerics), shape.rows * shape.cols
            own = numerics.where(shape.own)
            beside = strip_time(shape.strip, numel, grid.size, own, grid.neighbours)
            works.append(Work(flops, numel, by_rank, beside, index))
        return works

    def _in_one_round(self, cut: Cut) -> int:
        """The time of a step with all matrices in one round, as it is where ranks are
        many enough to share.
        """
        homes = self._homes(cut)
        together = [range(len(cut.parameters))]
        own = clocked(cut.works, homes, together, self._links)
        times = step_times([*self._begun, own], self.grid.size)
        flops = list(self.before)
        for work, home in zip(cut.works, homes, strict=True):
            flops[home] += work.load
        return with_later(*times, flops, self.later)


def with_later(
    worked: Sequence[int], ends: Sequence[int], flops: Sequence[int], later: int
) -> int:
    """The time of a step whose later optimizers have no homes yet.

    They fill ranks that have less to do than the mean of all, and leave those that
    would pass ``HOME_SLACK`` × the mean. Their messages count as long as a rank's mean
    of their work.

    Args:
        worked, ends: times of each rank by then (``step_times``).
        flops: of each rank by then.
        later: flops of later optimizers.
    """
    size = len(flops)
    mean, share = (sum(flops) + later) // size, later // size
    room = mean * HOME_SLACK.numerator // HOME_SLACK.denominator - share
    last = 0
    for rank, here in enumerate(flops):
        leaves = min(share, max(0, here - room))
        fills = max(0, mean - here) if later else 0
        last = max(last, ends[rank] + _LEAVES * leaves, worked[rank] + fills)
    return last + share
