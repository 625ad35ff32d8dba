"""Full steps and block steps, which orthogonalize each TP slice by itself
(``full_period``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime import collectives
from megatron_muon.runtime.collectives import Group


class BlockSteps:
    """Chooses between the two Muons of one optimizer, which have the same shards.

    Step n, from 0, is full where ``period`` divides n. Adam's number of steps, which is
    in every checkpoint, says n after a load.

    Args:
        full: Muon of whole matrices.
        block: Muon of each TP slice.
        period: steps from one full step to the next.
        group: the ranks of the stage, which all take the same kind of step.
    """

    def __init__(
        self, full: DistributedMuon, block: DistributedMuon, period: int, group: Group
    ) -> None:
        self.block = block
        self._full = full
        self._period = period
        self._group = group
        self._steps: int | None = None  # unknown before the first step, after a load

    def muon_of_step(self, groups: Sequence[Mapping[str, Any]]) -> DistributedMuon:
        """The Muon of the step under way. Every rank of the stage calls it.

        Args:
            groups: Megatron's parameter groups; without parameters here they may lack
                the number of steps.

        Raises:
            ValueError: on every rank: the ranks have loaded different steps.
        """
        if self._steps is None:
            self._steps = self._agreed_steps(groups)
        if self._steps % self._period == 0:
            return self._full
        self.block.start_next = self._full.start_next
        return self.block

    def end_step(self) -> None:
        """Count the step under way."""
        assert self._steps is not None
        self._steps += 1

    def forget(self) -> None:
        """Read the number of steps anew: another state is loaded."""
        self._steps = None

    def _agreed_steps(self, groups: Sequence[Mapping[str, Any]]) -> int:
        here = max((int(group.get("step") or 0) for group in groups), default=0)
        device = self.block.exchange.device
        gathered = collectives.all_gather_numbers([here], self._group, device)
        known = sorted({steps for (steps,) in gathered} - {0})
        if len(known) > 1:
            raise ValueError(
                f"the ranks of a pipeline stage have taken {known} steps, so none "
                "knows which step is full (--muon-full-period): load one checkpoint "
                "on all ranks, or omit the flag"
            )
        return max(known, default=0)
