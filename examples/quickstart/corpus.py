"""The texts: files of this Python's own, split by file into training and held-out
bytes.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SEPARATOR = b"\0"  # between files; no source file holds a NUL byte
# sysconfig's path, files
TEXTS = {"library": ("stdlib", "*.py"), "headers": ("include", "*.h")}
HELD_OUT_PER_256 = 26  # about a tenth of the files
TRAIN_STREAM, HELD_OUT_STREAM = 0, 1  # keep the two sequences of random windows apart


@dataclass(frozen=True)
class Corpus:
    """The two halves as uint8 arrays, the number of files in each, and a hash of all of
    it.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: int
    held_out_files: int
    sha256: str


def read_corpus(name: str = "library") -> Corpus:
    """Reads one of ``TEXTS``: the standard library's Python, or the C headers of
    Python's own.

    Files that pip installed are left out. The others are taken in the order of their
    relative paths; a second file with the same content is left out. A file is held out
    by the hash of its path, so it is never on both sides.
    """
    place, pattern = TEXTS[name]
    root = Path(sysconfig.get_paths()[place])
    digest = hashlib.sha256()
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    for path, text in _distinct_files(root, pattern):
        digest.update(path.encode() + SEPARATOR + text + SEPARATOR)
        held_out = hashlib.sha256(path.encode()).digest()[0] < HELD_OUT_PER_256
        halves[held_out].append(text)
    if not all(halves):
        raise ValueError(
            f"too few {pattern} files under {root} for a training and a held-out half"
        )
    train, held_out = (np.frombuffer(SEPARATOR.join(half), np.uint8) for half in halves)
    return Corpus(train, held_out, len(halves[0]), len(halves[1]), digest.hexdigest())


def _distinct_files(root: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Relative path and content of each file that is not a copy of an earlier one."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob(pattern))
    seen: set[bytes] = set()
    for name in names:
        if {"site-packages", "dist-packages"} & set(name.split("/")):
            continue
        text = (root / name).read_bytes()
        key = hashlib.sha256(text).digest()
        if key not in seen and text:
            seen.add(key)
            yield name, text


@dataclass(frozen=True)
class Batches:
    """Random windows of one text; which ones depends on (stream, seed, step, sample)
    alone.

    So any topology sees the same global batch at the same step. Data-parallel rank
    ``dp_rank`` takes samples ``[(m * dp_size + dp_rank) * micro_batch_size, ...)`` of
    micro-batch ``m``.
    """

    text: np.ndarray
    stream: int
    seed: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each data-parallel rank runs in a step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def step(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's micro-batches of one step: int64 tokens, labels, positions
        ``[mbs, seq]``.
        """
        rng = np.random.default_rng([self.stream, self.seed, step])
        last = len(self.text) - self.seq_length - 1
        starts = rng.integers(0, last, size=self.global_batch_size, endpoint=True)
        window = np.arange(self.seq_length + 1)
        positions = torch.arange(self.seq_length).expand(self.micro_batch_size, -1)
        for micro_batch in range(self.micro_batches):
            first = (micro_batch * self.dp_size + self.dp_rank) * self.micro_batch_size
            rows = starts[first : first + self.micro_batch_size, None] + window
            text = torch.from_numpy(self.text[rows].astype(np.int64))
            yield {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "positions": positions,
            }
