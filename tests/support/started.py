"""Reads the lines that a run prints at its start."""

from __future__ import annotations


def lines_at_start(printed: str) -> list[str]:
    """The plugin's lines, without those of choices that it has changed on a CPU."""
    return [
        line
        for line in printed.splitlines()
        if line.startswith("[megatron_muon] ")
        and not line.startswith("[megatron_muon] on the CPU: ")
    ]
