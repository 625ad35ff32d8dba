"""Two jobs save into one folder at once: never a complete checkpoint with files of both, and who
loses stops on all its ranks with an error that says who the other was."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.files import digest
from megatron_muon.files.claim import LOCK_NAME
from support.checkpoints.saving import formats
from support.checkpoints.two_jobs import (
    CLEAR,
    HASH,
    LOOK,
    PART,
    PUT,
    SEAL,
    SHARDS,
    Job,
    Meeting,
    meet,
    whose,
)
from support.installed import VERSION
from support.ranks import run

FORMAT = formats()[0]


def held(tmp_path: Path, a: Job, b: Job, **how: Any) -> tuple[Meeting, dict[str, list[str | None]]]:
    """The meeting, once it is over, and the errors of either job's ranks."""
    (tmp_path / "signals").mkdir()
    options = {"format": FORMAT, **how}
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    meeting = Meeting((a, b), str(folder), str(tmp_path / "signals"), **options)
    errors: dict[str, list[str | None]] = {"A": [], "B": []}
    pids: dict[str, set[str]] = {"A": set(), "B": set()}
    for result in run(meet, 2 * meeting.tp * meeting.dp, meeting):
        errors[result["job"]].append(result["error"])
        pids[result["job"]].add(str(result["pid"]))
    for name, other in (("A", "B"), ("B", "A")):
        texts = errors[name]
        assert len({text is None for text in texts}) == 1, texts  # all of its ranks, or none
        for text in texts:
            if text is not None:
                named = set(re.findall(r"process (\d+) on \S+, SLURM_JOB_ID job-" + other, text))
                assert named and named <= pids[other], text
    return meeting, errors


def lost(errors: dict[str, list[str | None]]) -> str:
    return "".join(name for name in "AB" if errors[name][0] is not None)


def kept(meeting: Meeting) -> str:
    """The job whose checkpoint it is, by all its tensors; "" where it is refused."""
    results = {tuple(result) for result in run(whose, meeting.tp * meeting.dp, meeting)}
    if all(len(result) == 1 and len(result[0]) == 1 for result in results):
        ((name,),) = results
        return str(name)
    assert all("DigestError" in text or "stopped this run" in text for (text,) in results), results
    return ""


@pytest.mark.parametrize("format", [FORMAT, "torch"])
def test_with_locks_the_second_stops_before_it_has_written(format: str, tmp_path: Path) -> None:
    point, sizes = (SHARDS, {"dp": 2}) if format == FORMAT else (PART, {"tp": 2, "dp": 1})
    a, b = Job("A", stops={point: "B done"}), Job("B", after=f"A at {point}")
    meeting, errors = held(tmp_path, a, b, format=format, **sizes)
    assert lost(errors) == "B"
    for text in errors["B"]:
        assert "is going on, that of process" in (text or "") and "written nothing" in (text or "")
    assert kept(meeting) == "A"
    assert not (Path(meeting.folder) / LOCK_NAME).exists()


@pytest.mark.skipif(VERSION < (0, 14), reason="its asynchronous writer fails with this torch")
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_a_save_in_the_background_holds_the_folder_until_it_is_finalized(
    locks: bool, tmp_path: Path
) -> None:
    a, b = Job("A", background="B done"), Job("B", after="A at background")
    meeting, errors = held(tmp_path, a, b, locks=locks)
    assert lost(errors) == ("B" if locks else "A")
    assert kept(meeting) == ("A" if locks else "")


@pytest.mark.skipif(VERSION < (0, 14), reason="its asynchronous writer fails with this torch")
def test_a_process_in_the_background_that_is_refused_says_why(tmp_path: Path) -> None:
    """What it raises is lost in Megatron, which says that a queue is empty."""
    a = Job("A", stops={LOOK: "B done"}, background="B done")
    meeting, errors = held(tmp_path, a, Job("B", after="A at look"), locks=False)
    assert lost(errors) == "A"
    assert kept(meeting) == ""


def test_who_clears_the_folder_while_another_begins_is_named(tmp_path: Path) -> None:
    """B has put its mark; A reads it, and B takes away the file that A's is written to."""
    a = Job("A", after="B at clear", stops={PUT: "B at shards"})
    b = Job("B", stops={CLEAR: "A at put", SHARDS: ""})
    meeting, errors = held(tmp_path, a, b, locks=False)
    assert lost(errors) == "A"
    assert kept(meeting) == "B"


# What each job waits for, who loses, and whose checkpoint it is then, on a file system without
# locks.
MEETINGS = {
    "A ends first": (
        Job("A", stops={SHARDS: "B at shards"}),
        Job("B", after="A at shards", stops={SHARDS: "A done"}),
        *("AB", ""),
    ),
    "B ends while A writes": (
        Job("A", stops={SHARDS: "B done"}),
        Job("B", after="A at shards"),
        *("A", ""),
    ),
    "B ends while A hashes": (  # so B has overwritten all of A's
        Job("A", stops={HASH: "B done"}),
        Job("B", after="A at hash"),
        *("A", "B"),
    ),
    "A seals while B writes": (
        Job("A", stops={SEAL: "B at shards"}),
        Job("B", after="A at seal", stops={SHARDS: "A done"}),
        *("B", ""),
    ),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_without_locks_the_mark_tells(name: str, tmp_path: Path) -> None:
    a, b, losers, winner = MEETINGS[name]
    meeting, errors = held(tmp_path, a, b, locks=False)
    assert lost(errors) == losers, errors
    assert kept(meeting) == winner
    saved = digest.read(Path(meeting.folder))
    assert saved is not None and saved["complete"] == bool(winner)
    if not winner:
        with pytest.raises(digest.DigestError, match="two saves wrote into it at once"):
            digest.require_complete(Path(meeting.folder), saved)


def test_what_the_other_says_while_the_digest_is_written_counts(tmp_path: Path) -> None:
    """B looks at its mark and writes its digest; in between A says that it has written there."""
    a = Job("A", stops={SHARDS: "B at seal"})
    b = Job("B", after="A at shards", stops={SEAL: "A done"})
    meeting, errors = held(tmp_path, a, b, locks=False)
    assert lost(errors) == "AB"
    assert kept(meeting) == ""


def test_without_locks_the_format_torch_tells_too(tmp_path: Path) -> None:
    """Both TP ranks write a file; B does while A is between its own."""
    a, b = Job("A", stops={PART: "B done"}), Job("B", after="A at part")
    meeting, errors = held(tmp_path, a, b, locks=False, format="torch", tp=2, dp=1)
    assert lost(errors) == "A"
    assert kept(meeting) == ""


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
@pytest.mark.parametrize("seed", range(12))
def test_at_random_moments(seed: int, locks: bool, tmp_path: Path) -> None:
    jobs = (Job(name, jitter=0.3) for name in "AB")
    meeting, errors = held(tmp_path, *jobs, locks=locks, seed=seed)
    winner = kept(meeting)
    assert not (winner and lost(errors) and winner in lost(errors))
    print(f"\nseed {seed}, locks {locks}: {lost(errors) or 'nobody'} lost, {winner or 'none'} kept")
