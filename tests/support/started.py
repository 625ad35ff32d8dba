"""Reads the lines that a run prints at its start."""

from __future__ import annotations

import re

_STAGES = re.compile(r"^\[megatron_muon\] pipeline stage ([\d, ]+): (.*)$")


def lines_at_start(printed: str) -> list[str]:
    """The plugin's lines without warnings and without choices that it has changed."""
    return [
        line
        for line in printed.splitlines()
        if line.startswith("[megatron_muon] ")
        and not line.startswith("[megatron_muon] warning: ")
        and not line.startswith("[megatron_muon] on the CPU: ")
    ]


def of_stages(printed: str) -> dict[int, str]:
    """What is said of each pipeline stage, by its number."""
    found: dict[int, str] = {}
    for line in printed.splitlines():
        match = _STAGES.match(line)
        if match is None:
            continue
        for number in match[1].split(", "):
            assert int(number) not in found, number
            found[int(number)] = match[2]
    return found
