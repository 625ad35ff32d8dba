"""Save, load, a kill during a save, and switches, by Megatron-core's own checkpoints.

Two sets of ranks. The first takes steps, saves, and is killed in its second save. The second starts
anew: the first save is whole, the second is refused. A run goes on from the first with the bits of
a run that was never stopped. AdamW and Muon go on from each other.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from typing import Any

from megatron_muon.lab.accept.apart import Ended, run_apart
from megatron_muon.lab.accept.outcome import Finding
from megatron_muon.lab.accept.settings import Settings, from_json

_RANKS = "megatron_muon.lab.accept.checks.checkpoint_ranks"
_SECONDS = 140.0  # of each set


def run(settings: Settings) -> list[Finding]:
    """Both sets, and what each shows."""
    if settings.device == "virtual":
        return [Finding("save, load, kill, switch", "not run", settings.why_no_gpu)]
    with tempfile.TemporaryDirectory(prefix="megatron_muon") as folder:
        argument = {"settings": settings.as_json(), "folder": folder}
        first = run_apart(
            f"{_RANKS}:save_and_be_killed", argument, settings.ranks, settings.gpus, _SECONDS
        )
        made = [killed(first)]
        if not Path(folder, "first", "metadata.json").exists():
            return [*made, Finding("a save", "FAILED", f"there is no save: {_errors(first)}")]
        second = run_apart(
            f"{_RANKS}:load_and_switch", argument, settings.ranks, settings.gpus, _SECONDS
        )
        return [*made, *after(second)]


def killed(ranks: list[Ended]) -> Finding:
    """Whether a rank was killed in its second save."""
    name = "a rank is killed during a save"
    if -signal.SIGKILL in [rank.code for rank in ranks]:
        return Finding(name, "ok", "with its shards written and its metadata not")
    return Finding(name, "FAILED", f"no rank was killed there: {_errors(ranks) or 'all ended'}")


def after(ranks: list[Ended]) -> list[Finding]:
    """A part for each claim that the second set tests on all ranks."""
    if any(not isinstance(rank.value, dict) for rank in ranks):
        return [
            Finding("load and switch", "FAILED", _errors(ranks) or "a rank did not end in time")
        ]
    made = []
    for name in ranks[0].value:
        faults = [
            f"rank {number}: {rank.value.get(name)}"
            for number, rank in enumerate(ranks)
            if rank.value.get(name) != "ok"
        ]
        made.append(Finding(name, "FAILED", "; ".join(faults)) if faults else Finding(name, "ok"))
    return made


def _errors(ranks: list[Ended]) -> str:
    return "; ".join(
        f"rank {number}: {rank.error}" for number, rank in enumerate(ranks) if rank.error
    )


def settings_of(argument: dict[str, Any]) -> Settings:
    """The settings in a rank's argument."""
    return from_json(argument["settings"])
