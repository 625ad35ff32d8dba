"""Save, load, a kill during a save, and switches, by Megatron-core's own checkpoints.

Two sets of ranks. The first takes steps, saves, and is killed in its second save. The
second starts anew: the first save is whole, the second is refused. A run goes on from
the first with the bits of a run that was never stopped. AdamW and Muon go on from each
other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_muon.lab.ranks import RankError
from support.gpu.checkpoint import CLAIMS, load_and_switch, save_and_be_killed
from support.gpu.model import on_ranks
from support.gpu.settings import Report, Settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SECONDS = 140.0  # of each set


@pytest.fixture(scope="module")
def saved(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The folder of both saves, and how the ranks ended."""
    folder = tmp_path_factory.mktemp("checkpoints")
    argument = {"settings": settings, "folder": str(folder)}
    with pytest.raises(RankError) as ended:
        on_ranks(settings, save_and_be_killed, argument, SECONDS)
    return folder, str(ended.value)


@pytest.fixture(scope="module")
def loaded(settings: Settings, saved: tuple[Path, str]) -> list[dict[str, Any]]:
    """By rank, the faults of each claim."""
    argument = {"settings": settings, "folder": str(saved[0])}
    return on_ranks(settings, load_and_switch, argument, SECONDS)


def test_a_rank_is_killed_during_a_save(
    saved: tuple[Path, str], report: Report
) -> None:
    folder, ended = saved
    assert "rank 0 died, exit code -9" in ended
    assert (folder / "first" / "metadata.json").exists()
    assert (
        any((folder / "second").iterdir())
        and not (folder / "second/metadata.json").exists()
    )
    report(text="with its shards written and its metadata not")


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_new_set_of_ranks_finds_that(
    claim: str, loaded: list[dict[str, Any]]
) -> None:
    assert {
        rank: faults[claim]
        for rank, faults in enumerate(loaded)
        if faults[claim] != "ok"
    } == {}
