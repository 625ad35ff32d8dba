"""Damage to checkpoints by chance, and what ``megatron-muon checkpoint inspect`` makes of it."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_muon.lab.commands import main
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.digest import sealed

TRACKER = "latest_checkpointed_iteration.txt"
ALLOWED = (0, 1, 2)


def statuses(
    roots: Sequence[Path], count: int, seed: int, work: Path
) -> tuple[collections.Counter[int], list[str]]:
    """Damage copies of checkpoints.

    Args:
        roots: folders of a tracker file and one iteration each, that are not changed.
        work: an empty folder.

    Returns:
        How often each exit status came, and what was wrong: another status, more than a line on
        stderr, or an error of no file's.
    """
    counts: collections.Counter[int] = collections.Counter()
    wrong: list[str] = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        root = work / "root"
        shutil.copytree(rng.choice(roots), root)
        what = [_damage(root, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        options = rng.choice(([], [], ["--json"], ["--hash"]))
        path = rng.choice((root, root, next(iter(sorted(root.glob("iter_*"))), root)))
        status, lines, error = _inspected([str(path), *options])
        counts[status] += 1
        if status not in ALLOWED or len(lines) > 1 or error:
            wrong.append(f"seed {seed} {number}: {what} {options}: {status} {lines} {error}")
        shutil.rmtree(root)
    return counts, wrong


def _inspected(argv: list[str]) -> tuple[int, list[str], str]:
    """(exit status, lines of stderr, what came out of it in place of a status)."""
    out, err = io.StringIO(), io.StringIO()
    status, error = -1, ""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(["checkpoint", "inspect", *argv])
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt):
                raise
            error = repr(raised)
    if status == 1 and "--json" not in argv and "\nnot complete: " not in out.getvalue():
        error = "it does not say why"
    return status, err.getvalue().splitlines(), error


# --- damage ---------------------------------------------------------------------------------------


def _damage(root: Path, rng: random.Random) -> str:
    """Change one thing; says what."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if not files:
        return "nothing is left"
    kind = rng.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
    file = rng.choice(files)
    if kind in ("digest", "tracker"):
        name = {"digest": digest.FILE_NAME, "tracker": TRACKER}[kind]
        file = next((path for path in files if path.name == name), file)
    _KINDS[kind][0](file, rng)
    return f"{kind} {file.name}"


def _cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size + 1))


def _flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        if data:
            data[_place(data, rng)] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _place(data: bytearray, rng: random.Random) -> int:
    """Anywhere, or in a pickle or a directory, which are few bytes among those of tensors."""
    marks = [mark for mark in (b"data.pkl", b"PK\x01\x02", b"PK\x05\x06") if mark in data]
    if not marks or rng.random() < 0.2:
        return rng.randrange(len(data))
    mark, at = rng.choice(marks), -1
    for _ in range(rng.randrange(1, 6)):
        after = data.find(mark, at + 1)
        at = at if after < 0 else after
    return min(len(data) - 1, at + rng.randrange(2000 if mark == b"data.pkl" else 100))


def _write_over(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    if data:
        at = _place(data, rng)
        size = rng.choice((1, 4, 8, 64))
        fill = rng.choice((b"\0", b"\xff", bytes([rng.randrange(256)]), rng.randbytes(size)))
        data[at : at + size] = (fill * size)[: min(size, len(data) - at)]
    file.write_bytes(data)


def _swap(file: Path, rng: random.Random) -> None:
    others = sorted(path for path in file.parent.iterdir() if path.is_file())
    other = rng.choice(others)
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


def _make_noise(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(rng.choice((0, 1, 100, 5000))))


def _change_digest(file: Path, rng: random.Random) -> None:
    """Another value or none somewhere in it, and sealed anew."""
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return _make_noise(file, rng)
    if isinstance(content, dict):
        content.pop("hash", None)
        _change(content, rng)
        file.write_text(sealed(content))
    return None


def _change(content: dict[str, Any], rng: random.Random) -> None:
    """A key of it, or of a dict in it."""
    key = rng.choice(list(content) or ["new"])
    inner = content.get(key)
    if isinstance(inner, dict) and inner and rng.random() < 0.7:
        _change(inner, rng)
    elif rng.random() < 0.3:
        content.pop(key, None)
    else:
        content[key] = rng.choice(_VALUES)


_VALUES = [None, True, 0, -1, 1.5, 10**30, "", "²", "../..", "x" * 1000, [], [[[]]], {}, {"a": {}}]


def _change_tracker(file: Path, rng: random.Random) -> None:
    texts = ["", "²", "-1", "99", "9" * 50, "release", "3\n4", "iter_0000003", "٣", "\0", " 3 "]
    file.write_text(rng.choice(texts))


_KINDS: dict[str, tuple[Callable[[Path, random.Random], None], int]] = {
    "cut": (_cut, 3),
    "flip": (_flip, 8),
    "write over": (_write_over, 6),
    "swap": (_swap, 2),
    "noise": (_make_noise, 1),
    "remove": (lambda file, _: file.unlink(), 1),
    "digest": (_change_digest, 3),
    "tracker": (_change_tracker, 1),
}
