"""The figures of a topology, and ratios of Muon to AdamW, each with its assumption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.compare.training import Trained

EXCHANGE = ("gather", "scatter")
MEGATRONS = ("grad_reduce", "param_gather")
# Bytes of an element in the buffers that a row of bench step has.
GRADIENTS, PARAMETERS, TRAVELLING = 4, 2, 2


@dataclass(frozen=True, slots=True)
class Figures:
    """One optimizer over one topology.

    Attributes:
        optimizer: "adamw" or "muon".
        step_ms, optimizer_ms: of the slowest rank.
        megatrons, exchange: bytes that all ranks send for gradients and parameters, and for Muon.
        busiest: bytes of the exchange of the rank that sends most.
        state_bytes, peak_bytes: of the rank that has most.
        link_bytes: of a step, of the rank that sends most over its link; 0 where it has none.
        losses: of each step.
    """

    optimizer: str
    step_ms: float
    optimizer_ms: float
    megatrons: int
    exchange: int
    busiest: int
    state_bytes: int
    peak_bytes: int
    link_bytes: int
    losses: tuple[float, ...]

    @property
    def share(self) -> float:
        """The optimizer's share of a step."""
        return self.optimizer_ms / self.step_ms


def figures(optimizer: str, ranks: Sequence[Trained]) -> Figures:
    """Put the ranks' measurements together."""
    sent = [sum(rank.sent.get(kind, 0) for kind in EXCHANGE) for rank in ranks]
    return Figures(
        optimizer=optimizer,
        step_ms=max(rank.step_ms for rank in ranks),
        optimizer_ms=max(rank.optimizer_ms for rank in ranks),
        megatrons=sum(rank.sent.get(kind, 0) for rank in ranks for kind in MEGATRONS),
        exchange=sum(sent),
        busiest=max(sent),
        state_bytes=max(rank.state_bytes for rank in ranks),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        link_bytes=max(rank.link_bytes for rank in ranks),
        losses=next(tuple(rank.losses) for rank in ranks if rank.losses),
    )


def bound(
    gradients: int = GRADIENTS, parameters: int = PARAMETERS, gathered: int = TRAVELLING
) -> float:
    """The most that the paper's algorithm sends beside AdamW's under ZeRO-1.

    It gathers the whole momentum of each rank's shard once (arXiv 2502.16982, section 2.3, where
    the three buffers give 5/4). The reduction of gradients and the all-gather of parameters
    send as many elements each, so only their bytes per element count.
    """
    return 1 + gathered / (gradients + parameters)
