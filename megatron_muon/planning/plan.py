"""The exchange plan: which rank orthogonalizes which matrix, and every slice that
travels.

Plain integers, a pure function of the stage's parameters, its grid of ranks and the
settings. So every rank makes the same plan without communication, and tests can count
its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from megatron_muon.orthogonalize.iteration import (
    gathers_of_rows,
    ns_flops,
    repeated_flops,
    strip_flops,
)
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid, held_shards
from megatron_muon.planning.homes import Loads, Work, choose_homes, prices
from megatron_muon.planning.layout import MatrixShape, Parameter, Span
from megatron_muon.planning.rounds.rank_plan import RankPlan, rank_plan
from megatron_muon.planning.rounds.stage import stage_rounds
from megatron_muon.planning.sharing.stage_time import stage_time
from megatron_muon.planning.sharing.strip_time import StripTime, faster_near, strip_time
from megatron_muon.planning.sharing.strips import (
    LEAST_SHARED_PS,
    Counts,
    SharedMatrix,
    can_share,
    choose_counts,
    in_strips,
    strip_homes,
)
from megatron_muon.planning.slices import (
    Matrix,
    Slice,
    all_slices,
    gather_message,
    held_elements,
)
from megatron_muon.settings.config import HomePolicy


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All of a stage's Muon work in one step; see the module's docstring."""

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    slices: tuple[Slice, ...]
    grid: RankGrid
    itemsize: int  # bytes of an element that travels
    flops: tuple[int, ...]  # Newton-Schulz flops of each matrix
    # indices of the parameters that go through the exchange together, in order
    rounds: tuple[tuple[int, ...], ...]
    # the matrices that several homes share; their strips are among matrices
    shared: tuple[SharedMatrix, ...]
    # the time of a step by both speeds, where these have chosen the homes, else 0
    ends: int = 0

    @property
    def size(self) -> int:
        """Number of ranks in the stage."""
        return self.grid.size

    def for_rank(self, rank: int) -> RankPlan:
        """The part of one rank of the stage."""
        return rank_plan(
            rank, self.grid, self.parameters, self.matrices, self.slices, self.rounds
        )

    def round_of(self) -> dict[int, int]:
        """The round of each parameter."""
        numbers: dict[int, int] = {}
        for number, round in enumerate(self.rounds):
            numbers |= dict.fromkeys(round, number)
        return numbers

    def ns_flops(self) -> list[int]:
        """Newton-Schulz floating-point operations of each rank in a step."""
        flops = [0] * self.size
        for matrix, work in zip(self.matrices, self.flops, strict=True):
            flops[matrix.home] += work
        return flops

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends to others in a step: slices there, directions
        back.

        Homes of one matrix also send squares to each other, and turn it.
        """
        sent = [0] * self.size
        for shared in self.shared:
            for message in shared.messages():
                for (rank, _), nbytes in message.sizes.items():
                    sent[rank] += nbytes
        for one in self.slices:
            home = self.matrices[one.matrix].home
            if home == one.rank:
                continue
            sent[home] += one.elements.size * self.itemsize
        for (_, rank, _), elements in self.gathered_elements().items():
            sent[rank] += elements * self.itemsize
        return sent

    def gathered_elements(self) -> dict[tuple[int, int, int], int]:
        """Elements of each gather message, by (round, sender, home); see
        ``gather_message``.
        """
        round_of = self.round_of()
        slices = defaultdict[tuple[int, int, int], list[int]](list)
        for one in self.slices:
            home = self.matrices[one.matrix].home
            if home != one.rank and not one.replica:
                message = round_of[one.parameter], one.rank, home
                slices[message].append(one.elements.size)
        return {
            message: gather_message(sum(sizes), len(sizes))
            for message, sizes in slices.items()
        }

    def boundary_parameters(self) -> list[Parameter]:
        """Those with shards on more than one DP rank."""
        return [p for p in self.parameters if p.is_boundary(self.grid.dp_size)]

    def validate(self) -> None:
        """Check that each matrix's elements are gathered once, and each shard gets
        directions once.

        Raises:
            ValueError: names the first matrix or parameter with a hole or an overlap.
        """
        gathered: dict[int, list[Span]] = defaultdict(list)
        returned: dict[tuple[int, int], list[Span]] = defaultdict(list)
        for one in self.slices:
            if not one.replica:
                gathered[one.matrix].append(one.staged)
            returned[one.parameter, one.rank].append(one.elements)
        for index, matrix in enumerate(self.matrices):
            _require_cover(matrix.name, gathered[index], Span(0, matrix.numel))
        for index, parameter in enumerate(self.parameters):
            for rank, shard in held_shards(parameter, self.grid):
                _require_cover(parameter.name, returned.pop((index, rank), []), shard)
        if returned:
            index, rank = min(returned)
            raise ValueError(
                f"{self.parameters[index].name}: rank {rank} holds none of it"
            )


def make_plan(
    parameters: Sequence[Parameter],
    grid: RankGrid,
    numerics: Numerics,
    earlier: Sequence[ExchangePlan] = (),
    later: int = 0,
) -> ExchangePlan:
    """Choose the homes and lay out every slice.

    Args:
        parameters: the stage's Muon parameters, in an order that is the same on all
            ranks.
        grid: the stage's ranks.
        numerics: of the run; with it ``homes``, the two speeds and ``round_bytes``.
        earlier: plans of the stage's optimizers that step before; homes balance all of
            them.
        later: ``flops_of`` those after it. Where they fill the ranks, it gains nothing
            to share.

    Raises:
        ValueError: the shards do not cover a parameter exactly once, or the plans have
            other ranks.
    """
    stage = _Stage(grid, numerics, _loads(earlier, grid, numerics), later)
    if numerics.config.homes_by_link:
        cuts = _in_strips(parameters, stage, "balanced", "local")
        every = (_homes_by_link(cut, stage, earlier) for cut in cuts)
        cut, homes, ends = min(every, key=lambda made: made[2])  # of the shortest step
    else:
        (cut,) = _in_strips(parameters, stage, numerics.config.homes)
        homes, ends = stage.homes(cut, numerics.config.homes), 0
    parameters = [parameter for parameter, _ in cut]
    works = _all_works(cut)
    shapes, owner = _shapes_of(parameters)
    matrices = tuple(
        _homed(parameter, shape, home)
        for (parameter, shape), home in zip(shapes, homes, strict=True)
    )
    plan = ExchangePlan(
        parameters=tuple(parameters),
        matrices=matrices,
        slices=tuple(all_slices(parameters, matrices, grid)),
        grid=grid,
        itemsize=numerics.itemsize,
        flops=tuple(_flops_at_homes(works, matrices, numerics)),
        rounds=stage_rounds(owner, matrices, works, grid.size, numerics),
        shared=tuple(_shared(owner, matrices, numerics)),
        ends=ends,
    )
    plan.validate()
    return plan


def _shapes_of(
    parameters: Sequence[Parameter],
) -> tuple[list[tuple[Parameter, MatrixShape]], list[int]]:
    """All matrices, each with its parameter, and the indices of these parameters."""
    shapes: list[tuple[Parameter, MatrixShape]] = []
    owner: list[int] = []
    for index, parameter in enumerate(parameters):
        for shape in parameter.matrices:
            shapes.append((parameter, shape))
            owner.append(index)
    return shapes, owner


def flops_of(parameters: Sequence[Parameter], numerics: Numerics) -> int:
    """Newton-Schulz flops of whole matrices."""
    return sum(
        flops_of_matrix(m, numerics) for each in parameters for m in each.matrices
    )


def flops_of_matrix(shape: MatrixShape | Matrix, numerics: Numerics) -> int:
    """Newton-Schulz flops of a matrix, or of a strip at its home."""
    strip = shape.strip
    if strip is None:
        return shape.units * ns_flops(*shape.unit, numerics)
    place = {"number": strip.number, "count": strip.count}
    return strip_flops(strip.rows, strip.cols, strip.long.size, numerics, **place)


_Cut = tuple[Parameter, Sequence[Work]]  # a parameter, and the work of its matrices


def _all_works(cut: Sequence[_Cut]) -> list[Work]:
    return [work for _, works in cut for work in works]


@dataclass(frozen=True, slots=True)
class _Stage:
    """The ranks of a stage, and what they have to do before the optimizer that is
    planned.
    """

    grid: RankGrid
    numerics: Numerics
    before: Loads
    later: int  # flops of those that step after it

    @property
    def faster(self) -> int:
        """How much faster a link inside a node is."""
        link = self.numerics.config.link_gbytes
        return faster_near(link, self.grid.size, self.grid.neighbours)

    def works(self, parameter: Parameter) -> list[Work]:
        """The work of each matrix of a parameter."""
        held = held_elements(parameter, self.grid)
        return [
            Work(
                flops_of_matrix(shape, self.numerics),
                shape.rows * shape.cols,
                by_rank,
                *_strip_time(shape, self.grid, self.numerics),
            )
            for shape, by_rank in zip(parameter.matrices, held, strict=True)
        ]

    def homes(self, cut: Sequence[_Cut], policy: HomePolicy) -> Sequence[int]:
        """The home of each matrix."""
        works, grid = _all_works(cut), self.grid
        strips = [shape.strip for parameter, _ in cut for shape in parameter.matrices]
        chosen = strip_homes(strips, works, self.before.flops)
        price, near = prices(self.numerics), grid.neighbours
        return choose_homes(works, grid.size, policy, price, chosen, self.before, near)

    def time(self, cut: Sequence[_Cut], policy: HomePolicy) -> int:
        """The time of the stage's step with these strips."""
        works = _all_works(cut)
        price = prices(self.numerics)
        homes = self.homes(cut, policy)
        near = self.grid.neighbours, self.faster
        return stage_time(works, homes, price, self.before, self.later, *near)


def _strip_time(
    shape: MatrixShape | Matrix, grid: RankGrid, numerics: Numerics
) -> StripTime:
    own = shape.rows * shape.cols
    return strip_time(shape.strip, own, grid.size, numerics, grid.neighbours)


def _loads(plans: Sequence[ExchangePlan], grid: RankGrid, numerics: Numerics) -> Loads:
    """What each rank has to do by some plans: their Newton-Schulz, and its link as a
    home.
    """
    size, price = grid.size, prices(numerics)
    flops, times = [0] * size, [0] * size
    for plan in plans:
        if plan.size != size:
            raise ValueError(
                f"a stage's optimizers have its {size} ranks, not {plan.size}"
            )
        strips = [_strip_time(matrix, grid, numerics) for matrix in plan.matrices]
        elements = [strip.elements for strip in strips]
        for one in plan.slices:
            if one.rank != plan.matrices[one.matrix].home:
                elements[one.matrix] += one.elements.size * (1 if one.replica else 2)
        for at, (matrix, work) in enumerate(
            zip(plan.matrices, plan.flops, strict=True)
        ):
            flops[matrix.home] += work
            times[matrix.home] += work * price.flop + elements[at] * price.element
            times[matrix.home] += strips[at].waits * price.picosecond
    return Loads(tuple(flops), tuple(times))


def _in_strips(
    parameters: Sequence[Parameter], stage: _Stage, *policies: HomePolicy
) -> list[Sequence[_Cut]]:
    """The parameters with shared matrices cut, once for each policy that has other
    strips.
    """
    numerics = stage.numerics

    @cache
    def cut(index: int, counts: tuple[int, ...]) -> _Cut:
        """A parameter with each matrix in so many strips: a plan tries few counts of
        each.
        """
        parameter = parameters[index]
        shapes = [(m.rows, m.cols) for m in parameter.matrices]
        count_of = dict(zip(shapes, counts, strict=True))

        def strips(shape: MatrixShape) -> int:
            count = count_of[shape.rows, shape.cols]
            return count if can_share(shape.rows, shape.cols, count, numerics) else 1

        made = in_strips(parameter, strips)
        return made, stage.works(made)

    def cut_all(counts: Counts, others: int = 1) -> Sequence[_Cut]:
        return [
            cut(
                index,
                tuple(counts.get((m.rows, m.cols), others) for m in parameter.matrices),
            )
            for index, parameter in enumerate(parameters)
        ]

    if numerics.split != "auto":
        return [cut_all({}, 1 if numerics.split == "off" else numerics.split)]
    least = LEAST_SHARED_PS * numerics.config.rank_tflops  # flops
    shapes: set[tuple[int, int]] = set()
    for parameter in parameters:
        if in_strips(parameter, lambda _: 2) is parameter:
            continue
        for m in parameter.matrices:
            if ns_flops(*m.unit, numerics) >= least:
                shapes.add((m.rows, m.cols))
    if not shapes:
        return [cut_all({})]
    can = partial(can_share, numerics=numerics)

    def time_of(policy: HomePolicy, counts: Counts) -> int:
        return stage.time(cut_all(counts), policy)

    size = stage.grid.size
    chosen = [
        choose_counts(sorted(shapes), size, partial(time_of, of), can)
        for of in policies
    ]
    return [
        cut_all(counts) for at, counts in enumerate(chosen) if counts not in chosen[:at]
    ]


_Homes = tuple[Sequence[_Cut], Sequence[int], int]  # of what, and the time


def _homes_by_link(
    cut: Sequence[_Cut], stage: _Stage, earlier: Sequence[ExchangePlan]
) -> _Homes:
    """The homes of these strips with which a step is shortest, and its time."""
    from megatron_muon.planning import link_homes  # only where a link is stated

    works, numerics = _all_works(cut), stage.numerics
    every, owner = _shapes_of([parameter for parameter, _ in cut])
    shared = (at for at, (_, shape) in enumerate(every) if shape.strip is not None)
    before, near = stage.before, (stage.grid.neighbours, stage.faster)
    directions = list(before.times)
    for plan in earlier:
        for one in plan.slices:
            at_home = before.times[plan.matrices[one.matrix].home]
            directions[one.rank] = max(directions[one.rank], at_home)
    of = link_homes.Stage(
        works, owner, frozenset(shared), before, directions, prices(numerics), *near
    )

    def rounds_of(homes: Sequence[int]) -> Sequence[Sequence[int]]:
        matrices = [
            _homed(parameter, shape, home)
            for (parameter, shape), home in zip(every, homes, strict=True)
        ]
        return stage_rounds(owner, matrices, works, stage.grid.size, numerics)

    choices = [stage.homes(cut, "balanced"), stage.homes(cut, "local")]
    return cut, *link_homes.fastest(of, choices, rounds_of)


def _shared(
    owner: Sequence[int], matrices: Sequence[Matrix], numerics: Numerics
) -> Iterator[SharedMatrix]:
    for index, matrix in enumerate(matrices):
        if matrix.strip is not None and matrix.strip.number == 0:
            strips = matrices[index : index + matrix.strip.count]
            yield SharedMatrix(
                parameter=owner[index],
                homes=tuple(strip.home for strip in strips),
                rows=matrix.strip.rows,
                cols=matrix.strip.cols,
                gathers=gathers_of_rows(*matrix.whole, len(strips), numerics),
                itemsize=4 if numerics.held == "fp32" else 2,
                turns=numerics.itemsize if matrix.strip.is_turned else 0,
            )


def _flops_at_homes(
    works: Sequence[Work], matrices: Sequence[Matrix], numerics: Numerics
) -> Iterator[int]:
    """A home that has several strips of a matrix, where ranks are few, makes whole
    squares once.
    """
    for index, (matrix, work) in enumerate(zip(matrices, works, strict=True)):
        again = matrix.strip is not None and matrix.strip.number > 0
        again = again and matrices[index - 1].home == matrix.home
        strips = 1 if matrix.strip is None else matrix.strip.count
        whole = repeated_flops(*matrix.whole, strips, numerics) if again else 0
        yield work.flops - whole


def _homed(parameter: Parameter, shape: MatrixShape, home: int) -> Matrix:
    return Matrix(
        name=shape.name,
        rows=shape.rows,
        cols=shape.cols,
        column_parts=shape.column_parts(parameter.column_parts),
        column_blocks=shape.column_blocks,
        home=home,
        units=shape.units,
        strip=shape.strip,
    )


def _require_cover(name: str, ranges: list[Span], whole: Span) -> None:
    position = whole.start
    for span in sorted(ranges):
        if span.start != position:
            kind = "is not covered" if span.start > position else "is covered twice"
            raise ValueError(f"{name}: element {min(span.start, position)} {kind}")
        position = span.stop
    if position != whole.stop:
        raise ValueError(
            f"{name}: elements {position} to {whole.stop} are not covered exactly"
        )
