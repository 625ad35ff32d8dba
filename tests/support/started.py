"""The lines of a run's start, read."""

from __future__ import annotations

import re

_STAGES = re.compile(r"^\[megatron_muon\] pipeline stage ([\d, ]+): (.*)$")


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
