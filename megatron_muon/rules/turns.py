"""Which steps are full, and which orthogonalize each TP slice by itself
(``full_period``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group


class Turns:
    """The two Muons of one optimizer, with the same shards.

    Step n, from 0, is full where ``period`` divides n. Adam's number of steps, which is
    in every checkpoint, says n after a load.

    Args:
        full, block: of whole matrices, and of slices.
        period: steps from one full step to the next.
        group: the ranks of the stage, which take the same turn.
    """

    def __init__(
        self, full: DistributedMuon, block: DistributedMuon, period: int, group: Group
    ) -> None:
        self.block, self._full = block, full
        self._period, self._group = period, group
        self._taken: int | None = None  # until a first step, and after a load

    def now(self, groups: Sequence[Mapping[str, Any]]) -> DistributedMuon:
        """The Muon of the step under way. Every rank of the stage calls it.

        Args:
            groups: Megatron's parameter groups; without parameters here they may lack
                the number.

        Raises:
            ValueError: on every rank: the ranks have loaded different steps.
        """
        if self._taken is None:
            taken = max((int(group.get("step") or 0) for group in groups), default=0)
            every = collectives.all_gather_numbers(
                [taken], self._group, self.block.exchange.device
            )
            known = sorted({steps for (steps,) in every} - {0})
            if len(known) > 1:
                raise ValueError(
                    f"the ranks of a pipeline stage have taken {known} steps, so none "
                    "knows which step is full (--muon-full-period): load one "
                    "checkpoint on all ranks, or leave the flag out"
                )
            self._taken = max(known, default=0)
        if self._taken % self._period == 0:
            return self._full
        self.block.start_next = self._full.start_next
        return self.block

    def end_step(self) -> None:
        """The step is taken."""
        assert self._taken is not None
        self._taken += 1

    def forget(self) -> None:
        """Another state is loaded."""
        self._taken = None
