"""``megatron-muon bench``: measurements, each a module of its own."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_muon.cli.dispatch import Commands, dispatch

BENCHES: Commands = {
    "step": (
        "megatron_muon.bench.step.command",
        "an optimizer step: AdamW, Muon in both layouts, the paper's, Megatron's own",
    ),
    "newton-schulz": (
        "megatron_muon.bench.newton_schulz.command",
        "how fast and how accurate the iterations are, beside others'",
    ),
    "speeds": (
        "megatron_muon.bench.speeds",
        "how fast a rank and its link are, as the flags that homes follow from",
    ),
    "price": (
        "megatron_muon.bench.price.command",
        "what a step of any size would take on stated hardware, by a time model",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run one.

    Args:
        argv: its name and its own arguments.

    Returns:
        The exit status: 0, 1 where the measurement failed, 2 where the arguments are wrong.
    """
    return dispatch("megatron-muon bench", BENCHES, argv)
