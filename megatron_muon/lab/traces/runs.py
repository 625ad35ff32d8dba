"""The traces of a run: a file, or a folder with a file for each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_muon.lab.traces.measure import RankTimes, RunTimes, rank_times
from megatron_muon.lab.traces.rank_trace import read
from megatron_muon.lab.traces.stream import TraceError

ENDS = (".json", ".json.gz")
MERGED = "merged"  # the start of the name of a file with all ranks, which is no rank's
_RANK = re.compile(r"rank[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)


def files_of(path: Path) -> list[Path]:
    """The traces of a run.

    Args:
        path: a file, or a folder with ``.json`` and ``.json.gz`` files.

    Raises:
        TraceError: there is no such file, or the folder has none.
    """
    if not path.is_dir():
        if not path.exists():
            raise TraceError(f"{path}: there is no such file or folder")
        return [path]
    files = sorted(
        file
        for file in path.iterdir()
        if file.name.endswith(ENDS) and not file.name.startswith((MERGED, "."))
    )
    if not files:
        raise TraceError(f"{path}: there is no file in it that ends in {' or '.join(ENDS)}")
    return files


def rank_of(path: Path, metadata: Mapping[str, Any], otherwise: int) -> int:
    """The rank whose trace this is, by its own words, else by its file's name.

    Args:
        path: the file.
        metadata: the trace's values outside its events.
        otherwise: the number where neither tells.
    """
    told = metadata.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 1 << 30:
        return rank
    named = _RANK.search(path.name)
    return int(named[1]) if named else otherwise


def run_times(path: Path, name: str) -> RunTimes:
    """Measure a run; one trace is in memory at a time.

    Args:
        path: see ``files_of``.
        name: name of the run.

    Raises:
        TraceError: a file is no trace, or two files are of one rank.
    """
    ranks: dict[int, RankTimes] = {}
    for number, file in enumerate(files_of(path)):
        trace = read(file)
        rank = rank_of(file, trace.metadata, number)
        if rank in ranks:
            raise TraceError(
                f"{file}: {ranks[rank].file} is of rank {rank}, too: give one run's folder, or "
                "each file by itself"
            )
        ranks[rank] = rank_times(trace, rank)
    return RunTimes(name, tuple(ranks[rank] for rank in sorted(ranks)))


def names_of(paths: Sequence[Path]) -> list[str]:
    """A short name for each run, all different."""
    names = [_stem(path) for path in paths]
    if len(set(names)) == len(names):
        return names
    names = [
        f"{path.resolve().parent.name}/{name}" for path, name in zip(paths, names, strict=True)
    ]
    if len(set(names)) == len(names):
        return names
    return [f"{number}:{name}" for number, name in enumerate(names, 1)]


def _stem(path: Path) -> str:
    name = path.resolve().name
    for end in (".gz", ".json", ".trace", ".pt"):
        name = name.removesuffix(end)
    return name
