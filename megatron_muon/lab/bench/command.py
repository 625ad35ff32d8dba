"""``megatron-muon bench``: measurements, each in a module of its own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.lab.dispatch import Commands, dispatch

BENCHES: Commands = {
    "step": (
        "megatron_muon.lab.bench.step.command",
        "an optimizer step: AdamW, Muon in both layouts, the paper's, Megatron's own",
    ),
    "newton-schulz": (
        "megatron_muon.lab.bench.newton_schulz.command",
        "speed and accuracy of the iterations, beside those of other packages",
    ),
    "speeds": (
        "megatron_muon.lab.bench.speeds",
        "speeds of a rank and its link, as the flags for the choice of homes",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run a measurement.

    Args:
        argv: its name and its own arguments.

    Returns:
        The exit status: 0, 1 where the measurement failed, 2 where the arguments are wrong.
    """
    return dispatch("megatron-muon bench", BENCHES, argv)
