"""A run that is saved, loaded and resumed, compared with one that does not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.checkpoints.resharding import resumed
from support.installed import require
from support.models.gpt import Case, Topology
from support.ranks import run


def check(
    case: Case, topology: Topology, format: str, folder: Path, **options: Any
) -> list[dict[str, Any]]:
    """Resuming equals going on, on every rank, and the steps after it did change
    something.
    """
    require(case, topology)
    limit = max(120.0, 30.0 * topology.world_size)
    size = topology.world_size
    args = (case, topology, format, str(folder), *options.values())
    results = run(resumed, size, *args, timeout=limit)
    for rank, result in enumerate(results):
        assert result["differences"] == [], f"rank {rank}"
        # none: all frozen
        assert result["moved"] or not result["held"]["shards"], f"rank {rank}"
    return results
