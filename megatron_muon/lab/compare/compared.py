"""Both optimizers over one topology, and a table of Markdown about several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.lab.compare.advantage import Timed
from megatron_muon.lab.compare.figures import Figures
from megatron_muon.lab.compare.predicted import Predicted
from megatron_muon.lab.compare.topology import Topology


@dataclass(frozen=True, slots=True)
class OverLinks:
    """Both optimizers where each rank's link has a rate, in 10^6 bits per second."""

    mbits: float
    adamw: Figures
    muon: Figures

    @property
    def timed(self) -> Timed:
        """The steps alone."""
        return Timed(self.mbits, self.adamw.step_ms, self.muon.step_ms)


@dataclass(frozen=True, slots=True)
class Compared:
    """AdamW and Muon over one topology, and over slow links where those could be made."""

    topology: Topology
    adamw: Figures
    muon: Figures
    predicted: Predicted
    links: tuple[OverLinks, ...] = ()

    @property
    def byte_ratio(self) -> float | None:
        """Bytes with Muon to those with AdamW; None where AdamW sends none."""
        if not self.adamw.megatrons:
            return None
        return (self.muon.megatrons + self.muon.exchange) / self.adamw.megatrons

    @property
    def peak_ratios(self) -> dict[str, float | None]:
        """Measured to planned peak of each optimizer; None where none is planned."""
        planned = self.predicted
        peaks = {
            "adamw": (self.adamw.peak_bytes, planned.adamw_peak),
            "muon": (self.muon.peak_bytes, planned.muon_peak),
        }
        return {
            name: measured / expected if expected else None
            for name, (measured, expected) in peaks.items()
        }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; all columns but the first are numbers."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
