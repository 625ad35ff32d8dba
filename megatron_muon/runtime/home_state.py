"""Numbers that a rule keeps at the homes of matrices, from step to step.

Each unit of a matrix has a number for each row or column of its long side. The homes of
a shared matrix have theirs for their strips. Outside a step, ``gathered`` brings all of
a stage together by the names of units, which are the same at every topology.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_muon.planning.layout import Matrix, Span
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group

if TYPE_CHECKING:
    from megatron_muon.planning.plan import ExchangePlan


class HomeState:
    """The numbers of one rank's matrices, fp32, zero at first.

    Args:
        matrices: of the stage.
        rank: of the stage.
        device: of the matrices.
        least: what no number of a checkpoint may be below.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rank: int,
        device: torch.device,
        least: float = -math.inf,
    ) -> None:
        self._matrices = matrices
        self._device = device
        self._least = least
        # by the matrix's index, ``(units, long side)``; of a strip, of its range
        self._at: dict[int, Tensor] = {}
        self._lengths: dict[str, int] = {}  # of all units of the stage
        self._silent: set[int] = set()  # matrices whose numbers another rank has, too
        for index, matrix in enumerate(matrices):
            self._lengths |= dict.fromkeys(matrix.unit_names, max(matrix.whole))
            if matrix.home == rank:
                shape = matrix.units, matrix.long
                self._at[index] = torch.zeros(shape, device=device)

    def of(self, matrix: int) -> Tensor:
        """The numbers of a matrix whose home this rank is, ``(units, long side)``.

        Args:
            matrix: its index. A strip has those of its range.
        """
        return self._at[matrix]

    def gathered(self, group: Group) -> dict[str, Tensor]:
        """New tensors with the numbers of all units of the stage, ``(long side,)``.

        Every rank of the stage calls it. Each place has one number and zeros, so their
        sum changes no bit.
        """
        flat, every = self._all_zero()
        for index in self._at.keys() - self._silent:
            places = self._places(index, every)
            for unit, place in zip(self._at[index], places, strict=True):
                place.copy_(unit)
        collectives.add_up("muon/state", flat, group)
        return every

    def wanted(self) -> dict[str, tuple[int, int]]:
        """Of each unit with a home here: its length, and the number of its first strip
        here, which is 0 on one rank of the stage.
        """
        found: dict[str, tuple[int, int]] = {}
        for index in self._at:
            matrix = self._matrices[index]
            number = self._number(index)
            for name in matrix.unit_names:
                found.setdefault(name, (self._lengths[name], number))
        return found

    def require_usable(
        self, saved: object, way_out: str, *, whole: bool = False
    ) -> None:
        """Raise ValueError where a file, which may hold anything, lacks numbers of the
        homes here, or with ``whole`` of the stage. It may have more, as of other homes.

        Args:
            saved: what the file has.
            way_out: ends an error about the names of units.
            whole: wants numbers of the whole stage.
        """
        if not isinstance(saved, Mapping):
            raise ValueError("the checkpoint's state of the rule has no names")
        for name in self._lengths if whole else self.wanted():
            length, found = self._lengths[name], saved.get(name)
            if not torch.is_tensor(found):
                raise ValueError(
                    f"the checkpoint has the rule's state of {len(saved)} units, and "
                    f"none of {name}. {way_out}"
                )
            if found.dtype != torch.float32 or found.shape != (length,):
                raise ValueError(
                    f"the rule's state of {name} is {found.dtype} of shape "
                    f"{tuple(found.shape)} in the checkpoint, torch.float32 of "
                    f"({length},) here"
                )
            if not bool(((found >= self._least) & found.isfinite()).all()):
                raise ValueError(
                    f"the rule's state of {name} in the checkpoint has a number that "
                    f"is below {self._least} or not finite: it is damaged"
                )

    def load(self, saved: Mapping[str, Tensor] | None) -> None:
        """Take the numbers of ``require_usable``; None: zeros. No communication."""
        for index, mine in self._at.items():
            if saved is None:
                mine.zero_()
                continue
            for unit, place in zip(mine, self._places(index, saved), strict=True):
                unit.copy_(place)

    def load_from_one(self, saved: Mapping[str, Tensor] | None, group: Group) -> None:
        """Take the numbers that one rank has read; None on the others, and where it has
        found none. Every rank of the stage calls it.
        """
        flat, every = self._all_zero()
        flat[0] = saved is not None
        if saved is not None:
            for name, numbers in every.items():
                numbers.copy_(saved[name])
        collectives.add_up("muon/state", flat, group)
        self.load(every if flat[0].item() else None)

    def _all_zero(self) -> tuple[Tensor, dict[str, Tensor]]:
        """A tensor of one number and those of all units of the stage; the latter by
        name.
        """
        lengths = list(self._lengths.values())
        flat = torch.zeros(1 + sum(lengths), device=self._device)
        parts = torch.split_with_sizes(flat[1:], lengths)
        return flat, dict(zip(self._lengths, parts, strict=True))

    def _number(self, index: int) -> int:
        strip = self._matrices[index].strip
        return 0 if strip is None else strip.number

    def _places(self, index: int, every: Mapping[str, Tensor]) -> list[Tensor]:
        """Of each unit of a matrix here, its part of the numbers of all units."""
        matrix = self._matrices[index]
        here = Span(0, matrix.long) if matrix.strip is None else matrix.strip.long
        return [every[name][here.start : here.stop] for name in matrix.unit_names]


class SliceState(HomeState):
    """The same where a unit has a few numbers that all ranks with slices of its matrix
    keep, alike.

    Args:
        plan: of the stage.
        rank: of the stage.
        length: numbers of a unit.
        device: of the main parameters.
        least: see ``HomeState``.

    Attributes:
        rows: ``(matrices with a slice here, units, length)``; of a matrix with fewer
            units than another the last ones are zero.
        row_of: the row of each of these matrices, by its index in the plan.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        rank: int,
        length: int,
        device: torch.device,
        least: float = -math.inf,
    ) -> None:
        self._matrices, self._device, self._least = plan.matrices, device, least
        self._lengths = {}
        self._silent = set()
        known: set[str] = set()
        row_of: dict[int, int] = {}
        for one in plan.slices:
            matrix = plan.matrices[one.matrix]
            self._lengths |= dict.fromkeys(matrix.unit_names, length)
            is_first = matrix.whole_name not in known
            known.add(matrix.whole_name)
            if one.rank == rank and one.matrix not in row_of:
                row_of[one.matrix] = len(row_of)
                if not is_first:
                    self._silent.add(one.matrix)
        most = max((matrix.units for matrix in plan.matrices), default=1)
        self.rows = torch.zeros(len(row_of), most, length, device=device)
        self.row_of = row_of
        self._at = {
            index: self.rows[row, : plan.matrices[index].units]
            for index, row in row_of.items()
        }

    def _number(self, index: int) -> int:
        return int(index in self._silent)

    def _places(self, index: int, every: Mapping[str, Tensor]) -> list[Tensor]:
        return [every[name] for name in self._matrices[index].unit_names]
