"""What is chosen for the matrices of a stage: their strips, homes and rounds.

Where ``link_gbytes`` is not stated, work alone decides what leaves the rank that holds
most of it (``homes``), as on links that are fast beside it. Where it is stated, homes
by work and the largest holders are both improved, and the clock decides. The first
choice, by work, stays unless another gains ``_LEAST_GAIN``. Of the ways to cut rounds,
and of the numbers of strips, the clock takes the shortest. Plain integers, the same on
every rank and restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

from megatron_muon.orthogonalize.iteration import ns_flops, strip_flops
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.clock import clocked, step_times
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.homes import (
    HOME_SLACK,
    Loads,
    Price,
    Speeds,
    Work,
    choose_homes,
    improved_by_time,
    prices,
)
from megatron_muon.planning.layout import MatrixShape, Parameter
from megatron_muon.planning.rounds.cut import ROUND_PS, Rounds, ways_to_cut
from megatron_muon.planning.sharing.strip_time import (
    LARGE_PRODUCTS,
    StripTime,
    faster_near,
    strip_time,
)
from megatron_muon.planning.sharing.strips import (
    LEAST_SHARED_PS,
    Counts,
    Kind,
    can_share,
    choose_counts,
    in_strips,
    is_far,
    strip_homes,
    with_few_far,
)
from megatron_muon.planning.slices import Matrix, held_elements
from megatron_muon.settings.config import HomePolicy
from megatron_muon.settings.patterns import AT_HOMES, only

# the bound is about as far from the time model's order of choices
_LEAST_GAIN = Fraction(1, 96)
_LEAST_PS = 200_000_000  # less is no gain
# A matrix that leaves its rank for another's travels there and back, between nodes in
# 1.6 to 2.4 times its own Newton-Schulz by the same model, of 2,048 x 7,168 without and
# with a kernel.
_LEAVES = 2


class Choice(NamedTuple):
    """Homes and rounds of matrices."""

    works: Sequence[Work]
    homes: Sequence[int]
    rounds: Rounds
    time: int = 0  # of the step by both speeds


class Cut(NamedTuple):
    """Parameters, with shared matrices in strips, and the work of all their
    matrices.
    """

    parameters: Sequence[Parameter]
    works: Sequence[Work]

    @property
    def matrices(self) -> list[MatrixShape]:
        return [shape for each in self.parameters for shape in each.matrices]


def flops_of_matrix(shape: MatrixShape | Matrix, numerics: Numerics) -> int:
    """Newton-Schulz flops of a matrix, or of a strip at its home."""
    numerics = numerics.where(shape.own)
    strip = shape.strip
    if strip is None:
        return shape.units * ns_flops(*shape.unit, numerics)
    place = {"number": strip.number, "count": strip.count}
    return strip_flops(strip.rows, strip.cols, strip.long.size, numerics, **place)


class Stage:
    """The ranks of a stage, and their other optimizers.

    Args:
        grid: its ranks.
        numerics: of the run; with it ``homes``, the two speeds and ``round_bytes``.
        earlier: what was chosen for the optimizers that step before.
        later: flops of those that step after. They have homes by what ranks have to do
            by then.

    Attributes:
        before: what each rank has to do for earlier optimizers: Newton-Schulz, and its
            link as a home.
        speeds: the clock's, as they are stated; where no link is, those of ``large``,
            between nodes ``LINK_GBYTES``, which are nearly those of a port of 400
            Gbit/s for each GPU.
        large: the same, but for the speed of large products on an H100.
    """

    def __init__(
        self,
        grid: RankGrid,
        numerics: Numerics,
        earlier: Sequence[Choice] = (),
        later: int = 0,
    ) -> None:
        self.grid, self.numerics, self.later = grid, numerics, later
        link, self._price = numerics.config.link_gbytes, prices(numerics)
        faster = faster_near(link, grid.size, grid.neighbours)
        stated = Speeds(self._price, grid.neighbours, faster)
        self.large = replace(stated, price=_at_large(self._price))
        self.speeds = self.large if link is None else stated
        flops = [0] * grid.size
        times = [0] * grid.size
        for choice in earlier:
            for work, home in zip(choice.works, choice.homes, strict=True):
                flops[home] += work.load
                times[home] += work.time_as_home(home, self._price)
        self.before = Loads(tuple(flops), tuple(times))
        self._begun = {
            speeds: [clocked(*choice[:3], speeds, grid.size) for choice in earlier]
            for speeds in (self.speeds, self.large)
        }

    def choose(
        self, parameters: Sequence[Parameter]
    ) -> tuple[Sequence[Parameter], Choice]:
        """The parameters with shared matrices in strips, and what is chosen for
        them.
        """
        config = self.numerics.config
        if not config.homes_by_link:
            (cut,) = self._cuts(parameters, [config.homes])
            homes = self._homes(cut, config.homes)
            return cut.parameters, self.in_rounds(cut.works, homes)
        found = []
        for cut in self._cuts(parameters, ["balanced", "local"]):
            choices = [self._homes(cut, "balanced"), self._homes(cut, "local")]
            found.append((cut.parameters, self.fastest(cut.works, choices)))
        return min(found, key=lambda one: one[1].time)

    def fastest(
        self, works: Sequence[Work], choices: Sequence[Sequence[int]]
    ) -> Choice:
        """The homes with which a step is shortest.

        Args:
            works: of each matrix and strip.
            choices: homes to begin with. Each, and then what is improved, has to gain
                on the best.
        """
        homes = list(choices)
        for first in choices:
            homes += improved_by_time(works, first, self.before, self.speeds)
        tried = [
            self.in_rounds(works, each) for each in dict.fromkeys(map(tuple, homes))
        ]
        least = Fraction(_LEAST_PS * self.speeds.price.picosecond)
        best = tried[0]
        for choice in tried:
            if choice.time < best.time - max(best.time * _LEAST_GAIN, least):
                best = choice
        return best

    def in_rounds(self, works: Sequence[Work], homes: Sequence[int]) -> Choice:
        """These homes, in the rounds with which a step is shortest."""
        choices = []
        for rounds in ways_to_cut(works, homes, self.numerics):
            _, ends = self._times(works, homes, rounds, self.speeds)
            choices.append(Choice(works, homes, rounds, max(ends)))
        one_more = ROUND_PS * self.speeds.price.picosecond
        return min(choices, key=lambda one: one.time + len(one.rounds) * one_more)

    def _times(
        self,
        works: Sequence[Work],
        homes: Sequence[int],
        rounds: Sequence[Sequence[int]],
        speeds: Speeds,
    ) -> tuple[list[int], list[int]]:
        """See ``step_times``."""
        own = clocked(works, homes, rounds, speeds, self.grid.size)
        return step_times([*self._begun[speeds], own], self.grid.size)

    def _homes(self, cut: Cut, policy: HomePolicy) -> Sequence[int]:
        """The home of each matrix by work."""
        strips = [shape.strip for shape in cut.matrices]
        chosen = strip_homes(strips, cut.works, self.before.flops)
        ranks = self.before, self.grid.neighbours
        return choose_homes(
            cut.works, self.grid.size, policy, self._price, chosen, *ranks
        )

    def _works(self, parameter: Parameter, index: int) -> list[Work]:
        """The work of each matrix of a parameter, which has this index."""
        grid, numerics = self.grid, self.numerics
        works = []
        held = held_elements(parameter, grid)
        for shape, by_rank in zip(parameter.matrices, held, strict=True):
            flops, numel = flops_of_matrix(shape, numerics), shape.rows * shape.cols
            own = numerics.where(shape.own)
            strip = strip_time(shape.strip, numel, grid.size, own, grid.neighbours)
            beside = self._flops_beside(strip) if shape.strip else 0
            works.append(Work(flops, numel, by_rank, *strip, index, beside))
        return works

    def _flops_beside(self, strip: StripTime) -> int:
        """Flops that take as long as what a strip takes beside its own."""
        price = self.large.price
        time = strip.elements * price.element + strip.waits * price.picosecond
        return time // price.flop

    def _cuts(
        self, parameters: Sequence[Parameter], policies: Sequence[HomePolicy]
    ) -> list[Cut]:
        """The parameters with shared matrices cut, once for each policy that has other
        strips.
        """
        numerics = self.numerics

        def can(kind: Kind, count: int) -> bool:
            return can_share(kind.rows, kind.cols, count, numerics.where(kind.own))

        @cache
        def cut(index: int, counts: tuple[int, ...]) -> tuple[Parameter, list[Work]]:
            """A parameter with each matrix in so many strips: a plan tries few counts
            of each.
            """
            made = in_strips(parameters[index], counts)
            return made, self._works(made, index)

        kinds: list[list[Kind]] = []  # of the matrices of each parameter
        for index, parameter in enumerate(parameters):
            _, works = cut(index, (1,) * len(parameter.matrices))
            every = zip(parameter.matrices, works, strict=True)
            kinds.append([self._kind(shape, work) for shape, work in every])
        kinds = with_few_far(kinds)

        def cut_all(counts: Counts, others: int = 1) -> Cut:
            cuts = []
            for index, own in enumerate(kinds):
                wanted = [
                    counts.get(kind, counts.get(kind.near(), others)) for kind in own
                ]
                possible = [
                    count if can(kind, count) else 1
                    for kind, count in zip(own, wanted, strict=True)
                ]
                cuts.append(cut(index, tuple(possible)))
            works = chain.from_iterable(works for _, works in cuts)
            return Cut([parameter for parameter, _ in cuts], list(works))

        if numerics.split != "auto":
            return [cut_all({}, 1 if numerics.split == "off" else numerics.split)]
        least = LEAST_SHARED_PS * numerics.config.rank_tflops  # flops
        large: set[Kind] = set()
        for parameter, own in zip(parameters, kinds, strict=True):
            if in_strips(parameter, [2] * len(own)) is parameter:
                continue
            for shape, kind in zip(parameter.matrices, own, strict=True):
                if ns_flops(*shape.unit, numerics.where(shape.own)) >= least:
                    large.add(kind)
        if not large:
            return [cut_all({})]

        def time_of(policy: HomePolicy, counts: Counts) -> int:
            return self._in_one_round(cut_all(counts), policy)

        size = self.grid.size
        chosen: list[Counts] = []
        for policy in policies:
            counts = choose_counts(sorted(large), size, partial(time_of, policy), can)
            if counts not in chosen:
                chosen.append(counts)
        return [cut_all(counts) for counts in chosen]

    def _kind(self, whole: MatrixShape, work: Work) -> Kind:
        own = only(whole.own, AT_HOMES)
        return Kind(
            whole.rows, whole.cols, own, is_far(work.held, self.grid.neighbours)
        )

    def _in_one_round(self, cut: Cut, policy: HomePolicy) -> int:
        """The time of a step with all matrices in one round, as it is where ranks are
        many enough to share.
        """
        homes = self._homes(cut, policy)
        together = [range(len(cut.parameters))]
        times = self._times(cut.works, homes, together, self.large)
        flops = list(self.before.flops)
        for work, home in zip(cut.works, homes, strict=True):
            flops[home] += work.load
        return with_later(*times, flops, self.later, self.large.price)


def with_later(
    worked: Sequence[int],
    ends: Sequence[int],
    flops: Sequence[int],
    later: int,
    price: Price,
) -> int:
    """The time of a step whose later optimizers have no homes yet.

    They fill ranks that have less to do than the mean of all, and leave those that
    would pass ``HOME_SLACK`` × the mean. Their messages count as long as a rank's mean
    of their work.

    Args:
        worked, ends: times of each rank by then (``step_times``).
        flops: of each rank by then.
        later: flops of later optimizers.
        price: of a flop.
    """
    size = len(flops)
    mean, share = (sum(flops) + later) // size, later // size
    room = mean * HOME_SLACK.numerator // HOME_SLACK.denominator - share
    last = 0
    for rank, here in enumerate(flops):
        leaves = min(share, max(0, here - room))
        fills = max(0, mean - here) if later else 0
        last = max(
            last,
            ends[rank] + _LEAVES * leaves * price.flop,
            worked[rank] + fills * price.flop,
        )
    return last + share * price.flop


def _at_large(price: Price) -> Price:
    """The same times, in a finer unit, where products are faster."""
    slower, faster = LARGE_PRODUCTS.denominator, LARGE_PRODUCTS.numerator
    return Price(price.flop * slower, price.element * faster, price.picosecond * faster)
