"""Warnings about a run from its records; each names a heading of the troubleshooting
page.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from megatron_muon.console import first_names
from megatron_muon.mcore.watching.record import Record
from megatron_muon.mcore.watching.rows import SUMS

# of a promised update; five Newton-Schulz steps give 0.75 to 0.95 of it
LOW, HIGH = (0.5, 1.25)
GROWTH = 2.0  # of a layer's output, from the second quarter of the records to the last
SETTLED = 1000  # steps; before, outputs grow from their start in every run
FEWEST = 8  # records in which growth can be seen
MOST = 4096  # outputs of a layer that are kept; then every second one is dropped
# Headings of the page.
_SPIKES = "Loss spikes"
_OFF = "Updates are off their promised size"
_EXPERTS = "Gains are smaller in a mixture of experts"
_GROW = "Outputs grow"
LOGIT = 100.0  # Kimi K2's threshold, where the run clips no logits


class Warnings:
    """The warnings of one run, in bounded memory; ``start`` is its first record."""

    def __init__(self, start: Record) -> None:
        self._threshold = start["logit_threshold"] or LOGIT
        self._promised = {
            row: about.get("promised_rms") for row, about in start["rows"].items()
        }
        self._off: set[str] = set()  # rows whose last update was off its promise
        self._outputs: dict[str, list[float]] = {}
        self._active: set[str] = set()  # warnings of the record before

    def of(self, record: Record) -> list[str]:
        """The warnings of one more record of a step; one that stays true comes once."""
        logits = f"attention logits above {self._threshold:g}"
        rules = (
            (_SPIKES, "not finite in the last step", _not_finite(record)),
            (
                _OFF,
                "updates are off their promised size, as a share of it",
                self._sizes(record),
            ),
            (
                _EXPERTS,
                "matrices without a gradient in the last step",
                _without_gradient(record),
            ),
            (_GROW, "outputs of layers grow", self._growing_outputs(record)),
            (_SPIKES, logits, self._logits(record)),
        )
        named = [(see, text, list(rows)) for see, text, rows in rules]
        before = self._active
        self._active = {text for _, text, rows in named if rows}
        return [
            f"{text}: {first_names(rows)}; see {see!r} in docs/troubleshooting.md"
            for see, text, rows in named
            if rows and text not in before
        ]

    def _sizes(self, record: Record) -> Iterator[str]:
        """Rows that are off in two successive records."""
        before, self._off = self._off, set()
        for row, numbers in record.get("muon", {}).items():
            promised = self._promised.get(row)
            update = numbers.get("update_rms")
            ratio = update / promised if promised and update is not None else 1.0
            if not LOW <= ratio <= HIGH:
                self._off.add(row)
                if row in before:
                    yield f"{row} {ratio:.2f}"

    def _growing_outputs(self, record: Record) -> Iterator[str]:
        for row, numbers in record.get("layers", {}).items():
            values = self._outputs.setdefault(row, [])
            if numbers["output_rms"] is not None:
                values.append(numbers["output_rms"])
            if len(values) > MOST:
                del values[::2]
            quarter = len(values) // 4
            if record["step"] < SETTLED or len(values) < FEWEST:
                continue
            before = median(values[quarter : 2 * quarter])
            now = median(values[-quarter:])
            if before > 0 and now > GROWTH * before:
                yield f"{row} {now / before:.1f} times"

    def _logits(self, record: Record) -> Iterator[str]:
        for row, numbers in record.get("logits", {}).items():
            value = numbers["max_logit"]
            if value is not None and value > self._threshold:
                yield f"{row} {value:.4g}"


def _not_finite(record: Record) -> Iterator[str]:
    for kind in SUMS:
        for row, numbers in record.get(kind, {}).items():
            yield from (
                f"{name} of {row}" for name, value in numbers.items() if value is None
            )


def _without_gradient(record: Record) -> Iterator[str]:
    for row, numbers in record.get("muon", {}).items():
        if numbers["moved"] is not None and numbers["moved"] < 1.0:
            yield f"{row} {1 - numbers['moved']:.0%}"
