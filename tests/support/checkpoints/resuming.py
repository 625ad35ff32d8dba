"""A run that is saved, loaded and resumed, compared with one that does not stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.checkpoints.saving import resumed
from support.models.gpt import Case, Topology, on_ranks


def check(
    case: Case, topology: Topology, format: str, folder: Path, **options: Any
) -> list[dict[str, Any]]:
    """Resuming equals going on, on every rank, and the steps after it did change
    something.
    """
    limit = max(120.0, 30.0 * topology.world_size)
    args = (case, topology, format, folder, *options.values())
    results = on_ranks(resumed, *args, timeout=limit)
    for rank, result in enumerate(results):
        assert result["differences"] == [], f"rank {rank}"
        # none: all frozen
        assert result["moved"] or not result["held"]["shards"], f"rank {rank}"
    return results
