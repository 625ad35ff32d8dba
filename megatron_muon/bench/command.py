"""``megatron-muon bench``: measurements, each a module of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHES = {
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
    lines = [f"  {name}  {purpose}" for name, (_, purpose) in BENCHES.items()]
    usage = "\n".join(["usage: megatron-muon bench WHAT ... (WHAT --help says more)", "", *lines])
    if not argv or argv[0] in ("-h", "--help"):
        print(usage, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    what, *rest = argv
    if what not in BENCHES:
        print(f"megatron-muon bench: error: nothing named {what!r}\n{usage}", file=sys.stderr)
        return 2
    return int(importlib.import_module(BENCHES[what][0]).main(rest))
