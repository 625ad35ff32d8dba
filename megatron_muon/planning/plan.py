"""The exchange plan: which rank orthogonalizes which matrix, and every slice that
travels.

Plain integers, a pure function of the stage's parameters, its grid of ranks and the
settings. So every rank makes the same plan without communication, and tests can count
its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_muon.orthogonalize.iteration import gathers_of_rows, repeated_flops
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid, held_shards
from megatron_muon.planning.homes import Work
from megatron_muon.planning.layout import Matrix, Parameter, Span
from megatron_muon.planning.rounds.rank_plan import RankPlan, RankRound
from megatron_muon.planning.schedule import round_numbers
from megatron_muon.planning.sharing.strips import SharedMatrix
from megatron_muon.planning.slices import Slice, all_slices, gather_message
from megatron_muon.planning.stage import Choice, Stage, flops_of
from megatron_muon.settings.config import MuonConfig
from megatron_muon.settings.patterns import OF_MATRICES, only, settings_of, written


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """All of a stage's Muon work in one step; see the module's docstring."""

    parameters: tuple[Parameter, ...]
    matrices: tuple[Matrix, ...]
    slices: tuple[Slice, ...]
    grid: RankGrid
    itemsize: int  # bytes of an element that travels
    works: tuple[Work, ...]  # the work of each matrix at its home
    # indices of the parameters that go through the exchange together, in order
    rounds: tuple[tuple[int, ...], ...]
    # the matrices that several homes share; their strips are among matrices
    shared: tuple[SharedMatrix, ...]

    @property
    def size(self) -> int:
        """Number of ranks in the stage."""
        return self.grid.size

    @property
    def flops(self) -> tuple[int, ...]:
        """Newton-Schulz flops of each matrix."""
        return tuple(work.flops for work in self.works)

    @property
    def choice(self) -> Choice:
        """What later optimizers of the stage need to know."""
        homes = [matrix.home for matrix in self.matrices]
        return Choice(self.works, homes, self.rounds)

    def for_rank(self, rank: int) -> RankPlan:
        """The part of one rank of the stage."""
        rounds = tuple(RankRound() for _ in self.rounds)
        round_of = {index: rounds[at] for index, at in self.round_of().items()}
        for index, matrix in enumerate(self.matrices):
            if matrix.home == rank:
                round_of[matrix.parameter].homes.append(index)
        for one in self.slices:
            home = self.matrices[one.matrix].home
            round = round_of[one.parameter]
            if rank == home == one.rank:
                # no replica: replicas are on other TP ranks than the home
                round.kept.append(one)
            elif rank == home:
                round.guests[one.rank].append(one)
            elif rank == one.rank:
                round.away[home].append(one)
        shards: dict[int, Span] = {}
        for index, parameter in enumerate(self.parameters):
            for holder, shard in held_shards(parameter, self.grid):
                if holder == rank:
                    shards[index] = shard
        return RankPlan(rank, shards, rounds)

    def round_of(self) -> dict[int, int]:
        """The round of each parameter."""
        return round_numbers(self.rounds)

    def ns_flops(self) -> list[int]:
        """Newton-Schulz floating-point operations of each rank in a step."""
        flops = [0] * self.size
        for matrix, work in zip(self.matrices, self.flops, strict=True):
            flops[matrix.home] += work
        return flops

    def sent_bytes(self) -> list[int]:
        """Bytes that each rank sends to others in a step: slices there, results
        back.

        Homes of one matrix also send each other squares, and rows for columns.
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
        dp_size = self.grid.dp_size
        return [p for p in self.parameters if len(list(p.shards(dp_size))) > 1]

    def validate(self) -> None:
        """Check that each matrix's elements are gathered once, and each shard gets
        results once.

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


def make_plans(
    parameters: Sequence[Sequence[Parameter]],
    grids: Sequence[RankGrid],
    numerics: Numerics,
) -> list[ExchangePlan]:
    """The plans of a stage's optimizers, in the order of their steps.

    Args:
        parameters: the Muon parameters of each.
        grids: the stage's ranks, as each optimizer has them.
        numerics: see ``make_plan``, also for errors.
    """
    every = [with_settings(each, numerics.config) for each in parameters]
    work = [flops_of(each, numerics) for each in every]
    plans: list[ExchangePlan] = []
    for at, (each, grid) in enumerate(zip(every, grids, strict=True)):
        plans.append(make_plan(each, grid, numerics, plans, sum(work[at + 1 :])))
    return plans


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
        numerics: of the run; with it ``homes``, ``split_matrices`` and ``round_bytes``.
        earlier: plans of the stage's optimizers that step before; homes balance all of
            them.
        later: ``flops_of`` those after it. Where they fill the ranks, it gains nothing
            to share.

    Raises:
        ValueError: the shards do not cover a parameter exactly once, or the plans have
            other ranks.
    """
    for plan in earlier:
        if plan.size != grid.size:
            raise ValueError(
                f"a stage's optimizers have its {grid.size} ranks, not {plan.size}"
            )
    parameters = with_settings(parameters, numerics.config)
    stage = Stage(grid, numerics, [plan.choice for plan in earlier], later)
    parameters, choice = stage.choose(parameters)
    matrices: list[Matrix] = []
    for index, parameter in enumerate(parameters):
        for shape in parameter.matrices:
            home = choice.homes[len(matrices)]
            parts = shape.held_by(parameter.column_parts).size
            matrices.append(
                replace(shape, column_parts=parts, home=home, parameter=index)
            )
    works = tuple(_works_at_homes(choice.works, matrices, numerics))
    plan = ExchangePlan(
        parameters=tuple(parameters),
        matrices=tuple(matrices),
        slices=tuple(all_slices(parameters, matrices, grid)),
        grid=grid,
        itemsize=numerics.itemsize,
        works=works,
        rounds=choice.rounds,
        shared=tuple(_shared(matrices, numerics)),
    )
    plan.validate()
    return plan


def with_settings(
    parameters: Sequence[Parameter], config: MuonConfig
) -> Sequence[Parameter]:
    """The parameters, whose matrices have their settings by pattern."""
    if not config.by_pattern:
        return parameters
    made = []
    for parameter in parameters:
        matrices = []
        for shape in parameter.matrices:
            part = parameter.part_of(shape)
            settings = settings_of(config.by_pattern, [parameter.name], part)
            own = only(written(settings), OF_MATRICES)
            matrices.append(replace(shape, own=own))
        made.append(replace(parameter, matrices=tuple(matrices)))
    return made


def _shared(matrices: Sequence[Matrix], numerics: Numerics) -> Iterator[SharedMatrix]:
    for index, matrix in enumerate(matrices):
        if matrix.strip is not None and matrix.strip.number == 0:
            strips = matrices[index : index + matrix.strip.count]
            yield SharedMatrix(
                parameter=matrix.parameter,
                homes=tuple(strip.home for strip in strips),
                rows=matrix.strip.rows,
                cols=matrix.strip.cols,
                gathers=gathers_of_rows(
                    *matrix.whole, len(strips), numerics.where(matrix.own)
                ),
                itemsize=4 if numerics.held == "fp32" else 2,
                row_itemsize=numerics.itemsize if matrix.strip.comes_as_rows else 0,
            )


def _works_at_homes(
    works: Sequence[Work], matrices: Sequence[Matrix], numerics: Numerics
) -> Iterator[Work]:
    """A home that has several strips of a matrix, where ranks are few, makes whole
    squares once.
    """
    before: Matrix | None = None
    for matrix, work in zip(matrices, works, strict=True):
        strip, flops = matrix.strip, work.flops
        again = before is not None and before.home == matrix.home
        if strip is not None and strip.number and again:
            own = numerics.where(matrix.own)
            flops -= repeated_flops(*matrix.whole, strip.count, own)
        before = matrix
        yield replace(work, flops=flops)


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
