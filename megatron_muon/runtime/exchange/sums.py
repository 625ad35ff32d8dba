"""Numbers of whole matrices: sums over their slices, on all ranks that hold one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_muon.planning.slices import Slice
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
        exchange: of this rank; its group adds, on its device.
    """

    def __init__(self, plan: ExchangePlan, number: int, exchange: Exchange) -> None:
        def whole(one: Slice) -> int:
            strip = plan.matrices[one.matrix].strip
            # the first strip stands for its matrix
            return one.matrix if strip is None else one.matrix - strip.number

        in_round = set(plan.rounds[number])
        # each slice once, those of a matrix one after another
        counted = [
            one for one in plan.slices if one.parameter in in_round and not one.replica
        ]
        counted.sort(key=lambda one: (whole(one), one.matrix, one.start))
        place_of = {id(one): place for place, one in enumerate(counted)}
        places: dict[int, list[int]] = {}  # of a matrix's slices
        for place, one in enumerate(counted):
            places.setdefault(whole(one), []).append(place)
        width = max(map(len, places.values()), default=0)
        for row in places.values():
            row += [len(counted)] * (width - len(row))  # a zero's place
        row_of = {key: row for row, key in enumerate(places)}
        mine = exchange.rounds[number].table.slices
        sources = [at for at, one in enumerate(mine) if not one.replica]

        def index(numbers: Sequence[Any]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=exchange.device)

        self._group = exchange.group
        self._count = len(counted)
        self._sources = index(sources)
        self._places = index([place_of[id(mine[at])] for at in sources])
        self._rows = index(list(places.values())).view(len(places), width)
        self._row_of_slice = index([row_of[whole(one)] for one in mine])

    def over_matrices(self, numbers: Tensor) -> Tensor:
        """The sums over each slice's matrix, from the numbers of the slices here.

        Every rank of the stage calls it, also one that holds no slice of the round.

        Args:
            numbers: ``(slices,)``, or ``(slices, k)`` with the same k on all ranks.

        Returns:
            fp32, of the shape of ``numbers``.
        """
        of_slice = numbers.shape[1:]
        every = numbers.new_zeros((self._count + 1, *of_slice), dtype=torch.float32)
        own = numbers.index_select(0, self._sources)
        every.index_copy_(0, self._places, own.float())
        collectives.add_up("muon/sums", every, self._group)
        by_matrix = every.index_select(0, self._rows.view(-1))
        sums = by_matrix.view(*self._rows.shape, *of_slice).sum(dim=1)
        return sums.index_select(0, self._row_of_slice)
