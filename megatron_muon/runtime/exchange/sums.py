"""Numbers of whole matrices: sums over their slices, on all ranks that hold one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_muon.planning.slices import Matrix, Slice
from megatron_muon.runtime import collectives
from megatron_muon.runtime.exchange.messages import Exchange

if TYPE_CHECKING:
    from megatron_muon.planning.plan import ExchangePlan


class SliceSums:
    """Adds a number of each slice over the slices of its matrix, in one round.

    Every rank fills in the numbers of its own slices, and one sum over the stage puts
    all of them together: each place has one number and zeros, so its order changes no
    bit. Then each rank adds the slices of a matrix, in the order of its elements. So
    the sums depend on how a matrix is cut, and on nothing else. Replicas of a slice
    count once; strips of a matrix count as that matrix.

    Args:
        plan: of the stage.
        number: of the round.
        rank: of the stage.
        exchange: of this rank; its group adds, on its device.
    """

    def __init__(
        self, plan: ExchangePlan, number: int, rank: int, exchange: Exchange
    ) -> None:
        self._group = exchange.group
        matrices, in_round = plan.matrices, set(plan.rounds[number])
        here = [one for one in plan.slices if one.parameter in in_round]
        mine = [one for one in here if one.rank == rank]
        mine.sort(key=lambda one: (one.parameter, one.elements))  # the table's order
        counted = [one for one in here if not one.replica]
        by_matrix: dict[int, list[Slice]] = {}
        for one in counted:
            by_matrix.setdefault(_whole_of(one.matrix, matrices), []).append(one)
        places: dict[int, int] = {}
        rows: list[list[int]] = []
        for whole in sorted(by_matrix):
            of_one = sorted(by_matrix[whole], key=lambda one: (one.matrix, one.start))
            first = len(places)
            places |= {id(one): first + at for at, one in enumerate(of_one)}
            rows.append(list(range(first, first + len(of_one))))
        self._count = len(places)
        width = max(map(len, rows), default=0)
        # a zero's place
        padded = [row + [self._count] * (width - len(row)) for row in rows]
        order = {whole: at for at, whole in enumerate(sorted(by_matrix))}
        sources = [at for at, one in enumerate(mine) if not one.replica]

        def index(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=exchange.device)

        self._sources = index(sources)
        self._places = index([places[id(mine[at])] for at in sources])
        self._padded = index(list(chain.from_iterable(padded)))
        self._shape = len(rows), width
        self._matrix_of = index(
            [order[_whole_of(one.matrix, matrices)] for one in mine]
        )

    def over_matrices(self, numbers: Tensor) -> Tensor:
        """The sums of each slice's matrix, from the numbers of the slices here.

        Every rank of the stage calls it, also one that holds no slice of the round.

        Args:
            numbers: ``(slices,)`` or ``(slices, k)``.

        Returns:
            As many in fp32.
        """
        others = numbers.shape[1:]
        every = numbers.new_zeros(self._count + 1, *others, dtype=torch.float32)
        own = numbers.index_select(0, self._sources)
        every.index_copy_(0, self._places, own.float())
        collectives.add_up("muon/sums", every, self._group)
        padded = every.index_select(0, self._padded).view(*self._shape, *others)
        return padded.sum(dim=1).index_select(0, self._matrix_of)


def _whole_of(matrix: int, matrices: Sequence[Matrix]) -> int:
    """The index of a matrix; of the first strip where it is one of several."""
    strip = matrices[matrix].strip
    return matrix if strip is None else matrix - strip.number
