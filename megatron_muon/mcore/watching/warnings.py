"""Warnings about a run from the numbers of its logging steps; each names a heading of
the troubleshooting page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from megatron_muon.console import first_names
from megatron_muon.mcore.watching.numbers import StepNumbers

# of a promised update; five Newton-Schulz steps give 0.75 to 0.95 of it
LOW, HIGH = (0.5, 1.25)
GROWTH = 2.0  # of a layer's output, from the second quarter of the steps to the last
SETTLED = 1000  # steps; before, outputs grow from their start in every run
FEWEST = 8  # logging steps in which growth can be seen
MOST = 4096  # outputs of a layer that are kept; then every second one is dropped
# Headings of the page.
_SPIKES = "Loss spikes"
_OFF = "Updates are off their promised size"
_EXPERTS = "Gains are smaller in a mixture of experts"
_GROW = "Outputs grow"
LOGIT = 100.0  # Kimi K2's threshold, where the run clips no logits


class Warnings:
    """The warnings of one run, in bounded memory.

    ``logit_threshold`` is that of the run's clip, if any; ``about`` says of Muon's rows
    what ``muon_rows`` does.
    """

    def __init__(
        self,
        logit_threshold: float | None,
        about: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._threshold = logit_threshold or LOGIT
        self._promised = {row: each.get("promised_rms") for row, each in about.items()}
        self._off: set[str] = set()  # rows whose last update was off its promise
        self._outputs: dict[str, list[float]] = {}
        self._active: set[str] = set()  # warnings of the logging step before

    def of(self, step: int, numbers: StepNumbers) -> list[str]:
        """The warnings of one more logging step; one that stays true comes once."""
        logits = f"attention logits above {self._threshold:g}"
        rules = (
            (_SPIKES, "not finite in the last step", _not_finite(numbers)),
            (
                _OFF,
                "updates are off their promised size, as a share of it",
                self._sizes(numbers),
            ),
            (
                _EXPERTS,
                "matrices without a gradient in the last step",
                _without_gradient(numbers),
            ),
            (_GROW, "outputs of layers grow", self._growing_outputs(step, numbers)),
            (_SPIKES, logits, self._logits(numbers)),
        )
        named = [(see, text, list(rows)) for see, text, rows in rules]
        before = self._active
        self._active = {text for _, text, rows in named if rows}
        return [
            f"{text}: {first_names(rows)}; see {see!r} in docs/troubleshooting.md"
            for see, text, rows in named
            if rows and text not in before
        ]

    def _sizes(self, step: StepNumbers) -> Iterator[str]:
        """Rows that are off in two successive logging steps."""
        before, self._off = self._off, set()
        for row, update in step.get("update_rms", {}).items():
            promised = self._promised.get(row)
            ratio = update / promised if promised else math.nan
            if math.isfinite(ratio) and not LOW <= ratio <= HIGH:
                self._off.add(row)
                if row in before:
                    yield f"{row} {ratio:.2f}"

    def _growing_outputs(self, number: int, step: StepNumbers) -> Iterator[str]:
        for row, output in step.get("output_rms", {}).items():
            values = self._outputs.setdefault(row, [])
            if math.isfinite(output):
                values.append(output)
            if len(values) > MOST:
                del values[::2]
            quarter = len(values) // 4
            if number < SETTLED or len(values) < FEWEST:
                continue
            before = median(values[quarter : 2 * quarter])
            now = median(values[-quarter:])
            if before > 0 and now > GROWTH * before:
                yield f"{row} {now / before:.1f} times"

    def _logits(self, step: StepNumbers) -> Iterator[str]:
        for row, logit in step.get("max_logit", {}).items():
            if logit > self._threshold:
                yield f"{row} {logit:.4g}"


def _not_finite(step: StepNumbers) -> Iterator[str]:
    for name, rows in step.items():
        bad = (row for row, value in rows.items() if not math.isfinite(value))
        yield from (f"{name} of {row}" for row in bad)


def _without_gradient(step: StepNumbers) -> Iterator[str]:
    for row, moved in step.get("moved", {}).items():
        if moved < 1.0:
            yield f"{row} {1 - moved:.0%}"
