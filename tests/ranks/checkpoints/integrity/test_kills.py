"""A killed save harms no older iteration, and the one that it wrote is never taken for
whole.

A rank, and what writes for it, is killed where it opens a file of the save; the others
wait for it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.checkpoints import saving, sealing
from support.checkpoints.saving import formats, unequal
from support.installed import VERSION
from support.models.gpt import Case, start, take_steps
from support.ranks import RankError, run
from support.runs.topologies import DP2

# Every rank writes shards of it.
(BY_ALL,) = {"dp_reshardable", "fully_sharded_model_space"} & {*formats()}
FILES = {
    "shards": r"__\d+_\d+\.distcp",
    "metadata": r"\.metadata.*|metadata\.json",
    "digest": r"megatron_muon\.json.*",  # first of the mark, then of the whole digest
    "torch": r".*_optim\.pt",
}


def _dies_at(phase: str, nth: int) -> None:
    """From now on this rank and its writers are killed at the nth file of a phase."""
    seen = [0]

    def at(path: Any, writes: int) -> None:
        name = os.path.basename(str(path))
        if writes & (os.O_WRONLY | os.O_RDWR) and re.fullmatch(FILES[phase], name):
            seen[0] += 1
            if seen[0] > nth:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(
        lambda event, args: at(args[0], args[2]) if event == "open" else None
    )
    own = torch.save

    def halved(what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """It opens files in C++, which no audit hook sees."""
        own(what, file, *args, **kwargs)
        if phase == "torch" and isinstance(file, (str, Path)):
            os.truncate(file, os.path.getsize(file) // 2)
            at(file, os.O_WRONLY)

    torch.save = halved


def _save(steps: int, format: str, folder: Path, background: bool, kill: Any) -> None:
    built = start(Case(), DP2)
    take_steps(built, range(steps))
    if kill is not None and dist.get_rank() == kill[2]:
        _dies_at(*kill[:2])
    if not background:
        sealing.save(built, folder, format)
        return
    with sealing.plugin(built):
        saving.save(built, folder, format, meanwhile=lambda: None)


def _loads(format: str, folders: list[str]) -> list[dict[str, Any]]:
    return [sealing.loaded(Case(), DP2, format, folder) for folder in folders]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By format: the folder of a run after one step, and what each rank gets by loading
    it.
    """

    @cache
    def of(format: str) -> Any:
        folder = tmp_path_factory.mktemp(format)
        run(_save, 2, 1, format, folder, False, None)
        return folder, run(_loads, 2, format, [folder])

    return of


KILLS = [
    ("shards", 0, 0),
    ("shards", 0, 1),
    ("metadata", 0, 0),
    ("digest", 0, 0),
    ("digest", 1, 0),
]


@pytest.mark.parametrize("over", [False, True], ids=["new", "over"])
@pytest.mark.parametrize(
    ("kill", "format", "background"),
    [
        *((kill, BY_ALL, False) for kill in KILLS),
        *((kill, BY_ALL, True) for kill in KILLS[1:3]),
        *((("torch", nth, 0), "torch", False) for nth in (0, 1)),
    ],
)
def test_a_killed_save_is_whole_or_refused(
    kill: Any, format: str, background: bool, over: bool, saves: Any, tmp_path: Path
) -> None:
    if background and not (0, 14) <= VERSION < (0, 19):
        pytest.skip(
            "its asynchronous writer needs an older torch, or nvidia-resiliency-ext"
        )
    once, expected = saves(format)
    older, newer = (tmp_path / f"iter_000000{number}" for number in (1, 2))
    shutil.copytree(once, older)
    if over:
        shutil.copytree(once, newer)
    with pytest.raises(RankError, match="ended with exit code -9"):
        run(_save, 2, 2, format, newer, background, kill)
    loads = run(_loads, 2, format, [older, newer])
    for (one,), (first, second) in zip(expected, loads, strict=True):
        assert first["error"] is None and not unequal(
            one["held"], first["held"], "", log=False
        )
        if second["error"] is None:  # nothing had begun
            assert over and kill[:2] == ("digest", 0)
            assert not unequal(one["held"], second["held"], "", log=False)
        elif kill[:2] != ("digest", 0):
            assert re.search(
                "is not complete: .* --ckpt-step 1 loads it", second["error"]
            )
