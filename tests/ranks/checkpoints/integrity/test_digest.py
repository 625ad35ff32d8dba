"""The digest of a checkpoint: its file, the checksum, and every damage refused on every rank."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.files import claim, digest, digest_parts
from megatron_muon.files.checksum import checksum
from megatron_muon.files.digest import DigestError
from megatron_muon.files.digest_text import sealed
from support.checkpoints.saving import formats, save_new
from support.checkpoints.sealing import KINDS, Corruption, corrupt, errors_of_loads, loaded, saved
from support.models.gpt import Case, Topology
from support.ranks import RankError, run

CASE = Case(steps=2)
DP = Topology(dp=2)
FORMATS = formats()


# --- the checksum ------------------------------------------------------------------------------


def hashed(folder: Path, content: bytes) -> str:
    (folder / "file").write_bytes(content)
    return checksum(folder / "file")


def archives(*tensors: torch.Tensor) -> bytes:
    """As a shard of torch_dist has them."""
    file = io.BytesIO()
    for tensor in tensors:
        torch.save(tensor, file)
    return file.getvalue()


NUMBERS = [torch.arange(count, dtype=torch.float32).sin() for count in (5000, 7, 2000, 1 << 21)]
SHARD = archives(*NUMBERS)


def test_the_checksum_is_the_same_everywhere(tmp_path: Path) -> None:
    """By its definition: the numbers of large tensors, found by their bytes, go in as CRC-32."""
    plain, whole = SHARD, hashlib.blake2b(digest_size=16)
    for tensor in NUMBERS:
        raw = tensor.numpy().tobytes()
        if len(raw) >= 4096:
            before, _, plain = plain.partition(raw)
            whole.update(before + zlib.crc32(raw).to_bytes(4, "little"))
    whole.update(plain)
    assert hashed(tmp_path, SHARD) == f"crc32+blake2b:{whole.hexdigest()}"
    assert checksum(tmp_path / "file", written=True) == checksum(tmp_path / "file")


def test_after_a_save_large_records_are_not_read_again(tmp_path: Path) -> None:
    """Nor is what has happened to them by then: what torch wrote is what counts."""
    (tmp_path / "file").write_bytes(SHARD)
    right = checksum(tmp_path / "file", written=True)
    at = SHARD.index(NUMBERS[3].numpy().tobytes())
    changed = SHARD[: at + 999] + b"?" + SHARD[at + 1000 :]
    (tmp_path / "file").write_bytes(changed)
    assert checksum(tmp_path / "file", written=True) == right != checksum(tmp_path / "file")


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


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=300))
def test_the_checksum_sees_what_is_put_behind(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, more: bytes
) -> None:
    folder = tmp_path_factory.mktemp("more")
    assert hashed(folder, content) != hashed(folder, content + more)
    assert hashed(folder, SHARD) != hashed(folder, SHARD + more)


@pytest.mark.parametrize("stop", [0, 1, 21, 22, 30, 4096, 20500, len(SHARD) - 1])
def test_the_checksum_sees_what_is_cut_off(stop: int, tmp_path: Path) -> None:
    assert hashed(tmp_path, SHARD[:stop]) != hashed(tmp_path, SHARD)
    assert hashed(tmp_path, SHARD[stop:]) != hashed(tmp_path, SHARD) or not stop


@pytest.mark.parametrize("unit", [8, 512, 4096])
def test_the_checksum_sees_parts_that_changed_places(unit: int, tmp_path: Path) -> None:
    whole = bytearray(SHARD)
    at = SHARD.index(NUMBERS[3].numpy().tobytes())
    to = at + 3 * unit
    whole[at : at + unit], whole[to : to + unit] = SHARD[to : to + unit], SHARD[at : at + unit]
    assert hashed(tmp_path, bytes(whole)) != hashed(tmp_path, SHARD)
    two = [archives(tensor) for tensor in (NUMBERS[0], NUMBERS[0].neg())]
    assert hashed(tmp_path, two[0] + two[1]) != hashed(tmp_path, two[1] + two[0])


def test_a_shard_cut_from_a_longer_one_is_no_longer_it(tmp_path: Path) -> None:
    """Every archive at the end of a file counts, and what is before them."""
    two = archives(*NUMBERS[:2])
    for more in (b"", b"PK", two, two[:-30]):
        assert hashed(tmp_path, more + two) != hashed(tmp_path, two) or not more


# --- the file ----------------------------------------------------------------------------------

CONTENT = {"wrote": {"world_size": 2}, "parameters": {}, "files": {}, "vocabulary": None}


def test_begin_and_finish(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    digest.begin(folder, CONTENT["wrote"])
    read_back = digest.read(folder)
    assert read_back is not None and read_back["complete"] is False
    with pytest.raises(DigestError, match=r"is not complete: .* no other checkpoint that is known"):
        digest.require_complete(folder, read_back)
    digest_parts.write_part(folder, claim.identity(), 1, {"files": {}})
    digest.finish(folder, CONTENT)
    read_back = digest.read(folder)
    assert read_back is not None and read_back["complete"] is True and read_back["format"] == 2
    digest.require_complete(folder, read_back)
    assert [path.name for path in folder.iterdir()] == [digest.FILE_NAME]  # no part is left
    assert digest.complete_iterations(tmp_path) == [3]


PARTS = {
    "nested deeply": "[" * 200_000 + "]" * 200_000,
    "a list": "[1, 2]",
    "pairs": '[["files", {}]]',
    "a number": "9" * 5000,
    "nothing": "",
    "no text": "\udcff",
    "a place elsewhere": '{"files": {"../a": {"size": 1, "hash": ""}}}',
    "files of another type": '{"files": [1]}',
    "parameters of another type": '{"files": {}, "parameters": {"a": 1}}',
}


@pytest.mark.parametrize("text", PARTS)
def test_a_damaged_part_is_an_ordinary_error_that_names_it(text: str, tmp_path: Path) -> None:
    save = claim.identity()
    digest_parts.write_part(tmp_path, save, 1, {"files": {}})
    (file,) = tmp_path.glob("*.part.json")
    file.write_bytes(PARTS[text].encode("utf-8", "surrogateescape"))
    for read in (
        lambda: digest_parts.read_part(tmp_path, save, 1),
        lambda: list(digest_parts.read_parts(tmp_path, save)),
    ):
        with pytest.raises(ValueError, match="is not what a rank of this save wrote") as caught:
            read()
        assert str(file) in str(caught.value)


@pytest.mark.timeout(60)
def test_pipes_in_a_folder_are_not_waited_for(tmp_path: Path) -> None:
    """Each of them an error; for the lock of another save and for a file of size 0, too."""
    save = claim.identity()
    digest_parts.write_part(tmp_path, save, 1, {"files": {}})
    (part,) = tmp_path.glob("*.part.json")
    part.unlink()
    lock, empty = tmp_path / claim.LOCK_NAME, tmp_path / "empty"
    for path in (part, lock, empty):
        os.mkfifo(path)
    for act in (
        lambda: digest_parts.read_part(tmp_path, save, 1),
        lambda: claim.take(tmp_path, save),
        lambda: claim.is_held(tmp_path),
        lambda: checksum(empty),
    ):
        with pytest.raises(OSError, match="no regular file"):
            act()
    assert claim.read(lock) is None and claim.join(tmp_path) is None
    fault = digest.fault(tmp_path, "empty", {"size": 0, "hash": ""}, checksum)
    assert fault is not None and "no regular file" in fault


def test_names_from_files_do_not_steer_a_terminal() -> None:
    for kind in (DigestError, digest.TwoSavesError):
        text = str(kind("a\x1b[2J\nforged\udcff²"))
        assert text == "a\\x1b[2J\\nforged\\udcff²"


def test_the_way_out_names_the_last_complete_one(tmp_path: Path) -> None:
    for number in (2, 4, 9):
        digest.begin(tmp_path / f"iter_{number:07d}", {})
        if number != 9:
            digest.finish(tmp_path / f"iter_{number:07d}", CONTENT)
    incomplete = digest.read(tmp_path / "iter_0000009")
    assert incomplete is not None
    with pytest.raises(DigestError, match="one beside it is 4: --ckpt-step 4 loads it"):
        digest.require_complete(tmp_path / "iter_0000009", incomplete)


def test_every_changed_character_of_it_is_seen(tmp_path: Path) -> None:
    digest.finish(tmp_path, CONTENT)
    path = tmp_path / digest.FILE_NAME
    text = path.read_bytes()
    for at in range(len(text)):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(DigestError, match=r"is damaged|is of format"):
            digest.read(tmp_path)
    for at in range(len(text) - 1):
        path.write_bytes(text[:at])
        with pytest.raises(DigestError, match="is damaged"):
            digest.read(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / digest.FILE_NAME).write_text(sealed({"format": 3, "complete": True}))
    with pytest.raises(DigestError, match=r"is of format 3, this megatron_muon reads 2: use the"):
        digest.read(tmp_path)


def test_no_digest_is_none(tmp_path: Path) -> None:
    assert digest.read(tmp_path) is None


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 10**12)), st.integers(1, 5))
def test_files_are_shared_out_once_each(sizes: dict[str, int], count: int) -> None:
    shares = digest.shared_out(sizes, count)
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    largest = max(sizes.values(), default=0)
    assert max(loads) - min(loads) <= largest + len(sizes)


# --- checkpoints -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A saved folder of a format, made once."""
    made: dict[str, Path] = {}

    def of(format: str) -> Path:
        if format not in made:
            folder = tmp_path_factory.mktemp(format)
            run(saved, 2, CASE, DP, format, str(folder))
            made[format] = folder
        return made[format]

    yield of


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_saved_is_loaded(format: str, checkpoint: Any, tmp_path: Path) -> None:
    kept = digest.read(checkpoint(format))
    assert kept is not None and kept["complete"]
    assert {entry["optimizer"] for entry in kept["parameters"].values()} == {"muon", "adamw"}
    qkv = kept["parameters"]["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv == {"shape": [160, 96], "optimizer": "muon", "split": "qkv"}
    files = {
        str(path.relative_to(checkpoint(format))): path
        for path in checkpoint(format).rglob("*")
        if path.is_file() and path.name != digest.FILE_NAME
    }
    assert kept["files"].keys() == files.keys()
    for name, path in files.items():
        assert kept["files"][name]["size"] == path.stat().st_size
        assert kept["files"][name]["hash"] == checksum(path)
    for result in run(loaded, 2, CASE, DP, format, str(checkpoint(format))):
        assert result["error"] is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_corruptions(format: str, block: int, checkpoint: Any, tmp_path: Path) -> None:
    """3 of each format, behind the marker 67 more: all refused, on every rank, by name."""
    seeds = range(3) if block == 0 else range(3, 70)
    done: list[Corruption] = []
    folders = []
    for seed in seeds:
        folder = tmp_path / f"iter_{seed:07d}"
        shutil.copytree(checkpoint(format), folder)
        done.append(corrupt(folder, seed + 1000 * FORMATS.index(format)))
        folders.append(str(folder))
    results = run(errors_of_loads, 2, CASE, DP, format, folders, timeout=1200.0)
    for rank, errors in enumerate(results):
        for corruption, folder, error in zip(done, folders, errors, strict=True):
            assert error is not None, (rank, corruption)
            named = [name for name in corruption.files if f"{folder}/{name} " in error]
            assert named, error
            expected = "is missing" if corruption.kind == "delete" else "bytes"
            assert expected in error, error
            shards = [name for name in named if re.search(r"distcp$|\d/.*\.pt$", name)]
            if shards and ".metadata" not in corruption.files:  # which says what is in them
                assert re.search(r"It holds .*(decoder|optimizer)", error), error
    print(f"\n{format}: {len(done)} corruptions refused on 2 ranks")


def test_every_kind_of_corruption_is_tried() -> None:
    assert {KINDS[seed % len(KINDS)] for seed in (*range(3), *range(3, 70))} == set(KINDS)


def test_the_digest_itself_damaged(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(checkpoint(FORMATS[0]), folder)
    path = folder / digest.FILE_NAME
    path.write_text(path.read_text().replace('"shape"', '"shapf"', 1))
    for errors in run(errors_of_loads, 2, CASE, DP, FORMATS[0], [str(folder)]):
        assert re.search(r"megatron_muon\.json is damaged", errors[0])


def test_an_incomplete_one_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    shutil.copytree(checkpoint(FORMATS[0]), folder)
    shutil.copytree(checkpoint(FORMATS[0]), tmp_path / "iter_0000005")
    digest.begin(folder, {})
    for errors in run(errors_of_loads, 2, CASE, DP, FORMATS[0], [str(folder)]):
        assert re.search(r"iter_0000007 is not complete: .* --ckpt-step 5 loads it", errors[0])


OTHER_MODELS = {
    "layers": (replace(CASE, layers=4), r"is of another model"),
    "gated": (
        replace(CASE, gated=True),
        r"another model: .*linear_fc1.weight is \(260, 96\) there",
    ),
    "experts": (replace(CASE, moe=True), r"another model: it has no .*experts"),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
@pytest.mark.parametrize("format", [FORMATS[0], "torch"])
def test_another_model_is_refused(other: str, format: str, checkpoint: Any) -> None:
    case, message = OTHER_MODELS[other]
    for errors in run(errors_of_loads, 2, case, DP, format, [str(checkpoint(format))]):
        assert re.search(message, errors[0] or ""), errors


def _loads_without(case: Case, topology: Topology, format: str, folder: str) -> tuple[Any, str]:
    import io
    from contextlib import redirect_stdout

    with redirect_stdout(io.StringIO()) as printed:
        result = loaded(case, topology, format, folder)
    return result["error"], printed.getvalue()


def test_without_a_digest_there_is_one_warning(tmp_path: Path) -> None:
    run(save_new, 2, CASE, DP, FORMATS[0], str(tmp_path))  # the hooks are not in place
    assert digest.read(tmp_path) is None
    printed = []
    for error, text in run(_loads_without, 2, CASE, DP, FORMATS[0], str(tmp_path)):
        assert error is None
        printed.append(re.findall(r"WARNING: .* has no megatron_muon.json", text))
    assert [len(lines) for lines in printed] == [1, 0]


def test_switched_off_there_is_none(checkpoint: Any, tmp_path: Path) -> None:
    off = replace(CASE, muon=(("checkpoint_digest", False),))
    run(saved, 2, off, DP, FORMATS[0], str(tmp_path))
    assert digest.read(tmp_path) is None
    shutil.copytree(checkpoint(FORMATS[0]), tmp_path / "damaged")
    content = json.loads((tmp_path / "damaged" / digest.FILE_NAME).read_text())
    (tmp_path / "damaged" / digest.FILE_NAME).write_text(json.dumps(content | {"format": 7}))
    (error, text), _ = run(_loads_without, 2, off, DP, FORMATS[0], str(tmp_path / "damaged"))
    assert error is None and "WARNING" not in text  # neither checked nor missed


def test_a_save_into_it_marks_it_incomplete_first(tmp_path: Path) -> None:
    """A rank that stops in the middle leaves a folder that is refused."""
    with pytest.raises(RankError, match="here it stops"):
        run(_stops_in_a_save, 2, CASE, DP, FORMATS[0], str(tmp_path))
    interrupted = digest.read(tmp_path)
    assert interrupted is not None and not interrupted["complete"]


def _stops_in_a_save(case: Case, topology: Topology, format: str, folder: str) -> None:
    from unittest import mock

    from megatron.core.dist_checkpointing import serialization

    with mock.patch.object(serialization, "save_preprocess", side_effect=OSError("here it stops")):
        saved(case, topology, format, folder)


def _addresses_of_an_adamw_run(folder: str) -> bool:
    """A run of AdamW's in a process that has the plugin: no digest, and nothing asked of others."""
    import megatron_muon
    from support.checkpoints import saving
    from support.models.gpt import start, take_step

    built = start(replace(CASE, optimizer="adam"), DP)
    take_step(built, 0)  # core 0.12 saves no state that is not there yet
    megatron_muon.install()
    try:
        saving.save(built, folder, FORMATS[0])
    finally:
        megatron_muon.uninstall()
    return (Path(folder) / digest.FILE_NAME).exists()


def test_adamws_checkpoints_have_none(tmp_path: Path) -> None:
    assert run(_addresses_of_an_adamw_run, 2, str(tmp_path)) == [False, False]


@pytest.mark.parametrize("name", ["megatron_muon.json", "megatron_muon.json.tmp"])
def test_own_files_are_no_part_of_it(name: str) -> None:
    assert digest.own_file(name) and not digest.own_file("__0_0.distcp")
