"""The checksum of a file: the same everywhere, and another for every change."""

from __future__ import annotations

import hashlib
import io
import random
import zlib
from pathlib import Path

import pytest
import torch

from megatron_muon.mcore.checkpoint.manifest import file_hash


def hashed(folder: Path, content: bytes) -> str:
    (folder / "file").write_bytes(content)
    return file_hash(folder / "file")


def archives(*tensors: torch.Tensor) -> bytes:
    """As a shard of torch_dist has them."""
    file = io.BytesIO()
    for tensor in tensors:
        torch.save(tensor, file)
    return file.getvalue()


NUMBERS = [
    torch.arange(count, dtype=torch.float32).sin() for count in (5000, 7, 2000, 1 << 21)
]
SHARD = archives(*NUMBERS)


def test_the_checksum_is_the_same_everywhere(tmp_path: Path) -> None:
    """By its definition: the numbers of large tensors, found by their bytes, go in as
    CRC-32.
    """
    plain, whole = SHARD, hashlib.blake2b(digest_size=16)
    for tensor in NUMBERS:
        raw = tensor.numpy().tobytes()
        if len(raw) >= 4096:
            before, _, plain = plain.partition(raw)
            whole.update(before + zlib.crc32(raw).to_bytes(4, "little"))
    whole.update(plain)
    assert hashed(tmp_path, SHARD) == f"crc32+blake2b:{whole.hexdigest()}"
    assert file_hash(tmp_path / "file", written=True) == file_hash(tmp_path / "file")


def test_after_a_save_large_records_are_not_read_again(tmp_path: Path) -> None:
    """Nor is what has happened to them by then: what torch wrote is what counts."""
    (tmp_path / "file").write_bytes(SHARD)
    right = file_hash(tmp_path / "file", written=True)
    at = SHARD.index(NUMBERS[3].numpy().tobytes())
    changed = SHARD[: at + 999] + b"?" + SHARD[at + 1000 :]
    (tmp_path / "file").write_bytes(changed)
    assert (
        file_hash(tmp_path / "file", written=True)
        == right
        != file_hash(tmp_path / "file")
    )


CONTENTS = {"plain": random.Random(1).randbytes(9000), "shard": archives(*NUMBERS[:3])}


@pytest.mark.parametrize("content", CONTENTS)
def test_the_checksum_sees_any_byte(content: str, tmp_path: Path) -> None:
    whole = CONTENTS[content]
    right = hashed(tmp_path, whole)
    choice = random.Random(2)
    large = whole.find(NUMBERS[0].numpy().tobytes()) if content == "shard" else 0
    assert large >= 0
    places = {*range(0, len(whole), 97), *range(max(0, large - 500), large + 8)}
    for at in places | set(range(len(whole) - 800, len(whole))):
        other = bytearray(whole)
        other[at] ^= 1 << choice.randrange(8)
        assert hashed(tmp_path, bytes(other)) != right, at


@pytest.mark.parametrize("unit", [8, 512, 4096])
def test_the_checksum_sees_parts_that_changed_places(unit: int, tmp_path: Path) -> None:
    whole = bytearray(SHARD)
    at = SHARD.index(NUMBERS[3].numpy().tobytes())
    to = at + 3 * unit
    whole[at : at + unit], whole[to : to + unit] = (
        SHARD[to : to + unit],
        SHARD[at : at + unit],
    )
    assert hashed(tmp_path, bytes(whole)) != hashed(tmp_path, SHARD)
    two = [archives(tensor) for tensor in (NUMBERS[0], NUMBERS[0].neg())]
    assert hashed(tmp_path, two[0] + two[1]) != hashed(tmp_path, two[1] + two[0])
