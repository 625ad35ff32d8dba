"""Each rank's work in each round of a plan, and what it sends in a step."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.planning.layout import Matrix
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.planning.rounds.table import stays_in_place
from megatron_muon.settings.patterns import AT_HOMES, only

Pairs = dict[tuple[int, int], int]  # bytes by (sender, receiver)
Slices = dict[int, list[int]]


class StateBytes(NamedTuple):
    """Bytes of an element's main parameter beside a weight, AdamW's moments, Muon's
    momentum, and of a row or column with a second moment (``settings.rules.RuleRow``).

    A part of all may be ``on_host``, where AdamW's are fp32.
    """

    main: int = 4
    first: int = 4
    second: int = 4
    momentum: float = 4
    on_host: float = 0.0
    of_rule: int = 0

    @property
    def of_adamw(self) -> tuple[int, int]:
        """Bytes of its main parameter, and of its moments."""
        return (4, 8) if self.on_host else (self.main, self.first + self.second)


WIDE = StateBytes()
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def state_bytes(flags: Namespace) -> StateBytes:
    """By Megatron-LM's flags, before it has mapped them to dtypes."""
    if not flags.use_precision_aware_optimizer:
        return WIDE
    # 16 bits that a weight lacks
    keeps = flags.bf16 and flags.main_params_dtype == "fp32"
    main = 2 if keeps else _BYTES[flags.main_params_dtype]
    on_host = flags.optimizer_offload_fraction if flags.optimizer_cpu_offload else 0.0
    first = _BYTES[flags.exp_avg_dtype]
    return StateBytes(main, first, _BYTES[flags.exp_avg_sq_dtype], first, on_host)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One DistributedOptimizer of a stage."""

    plan: ExchangePlan  # the plan of its Muon parameters
    rest: tuple[int, ...]  # by rank, elements that AdamW updates
    # parameters, gradients: bytes of Megatron's buffers on each rank, padding included
    parameters: int = 0
    gradients: int = 0
    has_main: bool = True  # whether main parameters are beside the parameters
    held: StateBytes = WIDE  # bytes of an element
    block: ExchangePlan | None = None  # the plan of its block steps, with full_period

    @property
    def muon(self) -> list[int]:
        """Elements of Muon's parameters on each rank."""
        held = [0] * self.plan.size
        for segment in self.plan.slices:
            held[segment.rank] += segment.elements.size
        return held

    @property
    def lines(self) -> list[int]:
        """Rows or columns of the long sides of matrices at home on each rank."""
        held = [0] * self.plan.size
        for matrix in self.plan.matrices:
            held[matrix.home] += matrix.units * matrix.long
        return held

    @property
    def elements(self) -> list[int]:
        """All elements of each rank."""
        return total([self.muon, self.rest])


class Shared(NamedTuple):
    """A strip of a matrix: the whole's rows and columns, its number of strips, the
    strip's length.

    ``comes_as_rows``: see ``layout.Strip``.
    """

    whole: tuple[int, int]
    strips: int
    long: int
    comes_as_rows: bool


class Layout(NamedTuple):
    """Matrices that Newton-Schulz can take together: of one shape, staged in one way,
    with the same settings of the iteration.
    """

    rows: int
    cols: int
    column_parts: int
    column_blocks: int
    shared: Shared | None = None
    own: str = ""  # settings by pattern

    @staticmethod
    def of(matrix: Matrix) -> Layout:
        shared = None
        if matrix.strip is not None:
            shared = Shared(
                matrix.whole, matrix.strip.count, matrix.long, matrix.comes_as_rows
            )
        own = only(matrix.own, AT_HOMES)
        columns = matrix.column_parts, matrix.column_blocks
        return Layout(*matrix.unit, *columns, shared, own)


class RoundWork:
    """One round, of ``size`` ranks; all else is by rank.

    Attributes:
        slices: elements of each slice that the rank holds.
        kept: those of them that are at home where they are.
        arriving, leaving: elements of each slice that it receives as a home, and of
            each slice of results that it sends as one.
        pieces: number of parameters that it holds slices of.
        layouts: number of matrices of each layout that it orthogonalizes.
        gather, scatter: bytes by pair of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slices: Slices = defaultdict(list)
        self.kept: Slices = defaultdict(list)
        self.arriving: Slices = defaultdict(list)
        self.leaving: Slices = defaultdict(list)
        self.pieces = Counter[int]()
        self.layouts: dict[int, Counter[Layout]] = defaultdict(Counter)
        self.gather: Pairs = defaultdict(int)
        self.scatter: Pairs = defaultdict(int)

    @property
    def held(self) -> list[int]:
        """Elements that each rank holds."""
        return [sum(self.slices[rank]) for rank in range(self.size)]

    def ranks(self, travels: bool | None = None, *, asks: bool = False) -> list[int]:
        """All ranks; or those that have a message in the round, or those without.

        Where a rule ``asks`` for sums, each has one.
        """
        every = range(self.size)
        if travels is None:
            return list(every)
        ends = set(every if asks else itertools.chain(*self.gather, *self.scatter))
        return [rank for rank in every if (rank in ends) == travels]

    def in_place(self, rank: int) -> bool:
        """Whether what the rank holds of its matrices stays where it is written."""
        moved = self.kept[rank], self.arriving[rank], self.leaving[rank]
        return stays_in_place(*map(sum, moved))


def rounds_of(plan: ExchangePlan) -> list[RoundWork]:
    """Every round of a plan, for all ranks in one pass over its segments."""
    rounds = [RoundWork(plan.size) for _ in plan.rounds]
    round_of = {index: rounds[number] for index, number in plan.round_of().items()}
    for parameter, rank in {(part.parameter, part.rank) for part in plan.slices}:
        round_of[parameter].pieces[rank] += 1
    for segment in plan.slices:
        work, elements = round_of[segment.parameter], segment.elements.size
        rank, home = segment.rank, plan.matrices[segment.matrix].home
        work.slices[rank].append(elements)
        if home == rank:
            work.kept[home].append(elements)
            continue
        work.leaving[home].append(elements)
        work.scatter[home, rank] += elements * plan.itemsize
        if not segment.replica:
            work.arriving[home].append(elements)
    for (number, rank, home), elements in plan.gathered_elements().items():
        rounds[number].gather[rank, home] = elements * plan.itemsize
    for matrix in plan.matrices:
        of_home = round_of[matrix.parameter].layouts[matrix.home]
        of_home[Layout.of(matrix)] += matrix.units
    return rounds


def total(counts: Sequence[Sequence[int]]) -> list[int]:
    """The sum of several lists, by rank."""
    return [sum(of_rank) for of_rank in zip(*counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one step, by rank of the stage."""

    # inside, between: bytes that the rank sends to others of its node, and to other
    # nodes
    inside: list[int]
    between: list[int]
    messages: list[int]  # number of messages that it sends
    peers: list[int]  # number of ranks that it sends to or receives from

    @property
    def sent(self) -> list[int]:
        """All bytes that each rank sends."""
        return total([self.inside, self.between])


def traffic_of(plans: Sequence[ExchangePlan], nodes: Sequence[int]) -> Traffic:
    """What the ranks of a stage send for its plans; ``nodes`` has the node of each
    rank.
    """
    size = len(nodes)
    inside, between, messages = [0] * size, [0] * size, [0] * size
    peers: list[set[int]] = [set() for _ in nodes]
    for pairs in _exchanges(plans):
        for (sender, receiver), nbytes in pairs.items():
            way = inside if nodes[sender] == nodes[receiver] else between
            way[sender] += nbytes
            messages[sender] += 1
            peers[sender].add(receiver)
            peers[receiver].add(sender)
    return Traffic(inside, between, messages, [len(others) for others in peers])


def _exchanges(plans: Sequence[ExchangePlan]) -> Iterator[Pairs]:
    for plan in plans:
        for work in rounds_of(plan):
            yield work.gather
            yield work.scatter
        for shared in plan.shared:
            yield from (dict(message.sizes) for message in shared.messages())
