"""No byte of a checkpoint chooses code that runs: in ``inspect``, and in our loads of training.

Each attack is tried on what trusts files first, so that a canary that stays away means something.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.lab.inspect.torch_dist_files import tensor_of
from megatron_muon.mcore.load_check import digest
from support.checkpoints.attacks import ATTACKS, PICKLES, Touch, trusted
from support.checkpoints.inspecting import DEFAULT, inspected, one_of_each_kind


def _replaced(file: Path, attack: str, canary: Path) -> bytes:
    """What to write in place of a file, once it is known to do what it is to do."""
    data = ATTACKS[attack](canary)
    trial = canary.with_name("trial")
    trial.write_bytes(data)
    trusted(attack, trial)
    assert canary.exists(), "the attack itself does not work"
    canary.unlink()
    return data


@contextmanager
def _in_place_of(file: Path, data: bytes) -> Iterator[bytes | None]:
    """Within it a file has other bytes, or is there; those that it had, None where it was not."""
    original = file.read_bytes() if file.exists() else None
    file.write_bytes(data)
    yield original
    if original is None:
        file.unlink()
    else:
        file.write_bytes(original)


@pytest.mark.parametrize("attack", ATTACKS)
def test_inspect_runs_nothing_of_any_file(
    attack: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    data = _replaced(folder, attack, canary)
    for name in [*one_of_each_kind(folder), "common.pt", "model_optim_rng.pt"]:
        with _in_place_of(folder / name, data) as original:
            status, said = inspected(folder, capsys)
        assert not canary.exists(), f"{name} ran"
        is_sharded = (folder / ".metadata").exists()
        used = original is not None or (name == "common.pt") == is_sharded
        if attack == "archive":  # which is read, but for the object that is of no known class
            assert status in (0, 1)
        elif used:
            assert status == 1 and name in said
        else:
            assert status == 0
    assert inspected(folder, capsys)[0] == 0
    if (folder / ".metadata").exists():  # an object among the shards
        entries = _metadata_of(folder).state_dict_metadata
        _put_object(
            folder, next(k for k in entries if "optimizer" in k and _is_object(entries[k])), data
        )
        status, said = inspected(folder, capsys)
        assert not canary.exists() and (attack == "archive" or "__9_0.distcp" in said)


def _metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _is_object(entry: Any) -> bool:
    return type(entry).__name__ == "BytesStorageMetadata"


def _put_object(folder: Path, key: str, data: bytes) -> None:
    """Have the metadata place an object in a file of its own."""
    metadata = _metadata_of(folder)
    index = next(index for index in metadata.storage_data if index.fqn == key)
    place = metadata.storage_data[index]
    (folder / "__9_0.distcp").write_bytes(data)
    changed = type(place)("__9_0.distcp", 0, len(data))
    metadata.storage_data[index] = changed
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("whole_one", [DEFAULT], indirect=True)
@pytest.mark.parametrize("place", ["../canary", "/etc/hostname", "..", "", "a/b", "x\0y"])
def test_metadata_name_no_file_elsewhere(
    place: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = _metadata_of(folder)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = type(info)(place, info.offset, info.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    status, said = inspected(folder, capsys)
    assert status == 1 and ".metadata cannot be read" in said and "no name of a file" in said


# --- the loads of training that are ours ---------------------------------------------------------


def _loads(folder: Path) -> dict[str, Callable[[], Any]]:
    """All that we open of a checkpoint before Megatron reads it."""
    from megatron_muon.mcore.checkpoint.interop.saved import Saved

    return {
        "writer": lambda: Saved.of(folder).writer,
        "foreign_writer": lambda: Saved.of(folder).foreign_writer,
        "record": lambda: Saved.of(folder).record(),
        "digest": lambda: digest.read(folder),
    }


def _as_megatron_lm(folder: Path) -> None:
    """The files of the first rank, by the names that Megatron-LM gives them."""
    (folder / "mp_rank_00").mkdir(exist_ok=True)
    for file in folder.glob("0_0_0_model_optim.pt"):
        shutil.copy(file, folder / "mp_rank_00" / "model_optim_rng.pt")


@pytest.mark.parametrize("attack", ATTACKS)
def test_training_runs_nothing_before_megatron_does(
    attack: str, folder: Path, tmp_path: Path
) -> None:
    _as_megatron_lm(folder)
    canary = tmp_path / "canary"
    data = _replaced(folder, attack, canary)
    names = ["mp_rank_00/model_optim_rng.pt"]
    if (folder / ".metadata").exists():
        names = [".metadata", "common.pt", digest.FILE_NAME]
        entries = _metadata_of(folder).state_dict_metadata
        objects = [k for k in entries if _is_object(entries[k]) and ".megatron_muon/" in k]
        for key in objects:
            names.append("__9_0.distcp")
            _put_object(folder, key, data)
            assert _errors(folder) or attack == "archive"
            assert not canary.exists()
        assert objects
    refused: list[str] = []
    for name in names:
        with _in_place_of(folder / name, data):
            errors = _errors(folder)
        assert not canary.exists(), f"{name} ran"
        refused += [error for error in errors if Path(name).name in error]
    assert refused or attack == "archive"


def _errors(folder: Path) -> list[str]:
    """Of each load: those that it is allowed to raise."""
    errors = []
    for load in _loads(folder).values():
        try:
            load()
        except (ValueError, KeyError, OSError) as error:
            errors.append(str(error))
    return errors


def test_what_training_reads_is_what_is_there(folder: Path) -> None:
    """The readers of our own and torch's agree on a checkpoint that nobody has touched."""
    from megatron_muon.mcore.checkpoint.interop.saved import Saved

    _as_megatron_lm(folder)
    saved = Saved.of(folder)
    assert saved.writer == "muon" and saved.foreign_writer is None
    assert saved.record()["settings"]["momentum"] == 0.95
    if not (folder / ".metadata").exists():
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    expected, actual = FileSystemReader(folder).read_metadata(), saved.metadata
    assert expected.state_dict_metadata.keys() == actual.entries.keys()
    places = {(at.fqn, at.offset): info for at, info in expected.storage_data.items()}
    assert places.keys() == actual.places.keys()
    for key, entry in expected.state_dict_metadata.items():
        ours = tensor_of(actual.entries[key])
        assert _is_object(entry) == (ours is None)
        if ours is None:
            continue
        assert (tuple(entry.size), entry.properties.dtype) == (ours.size, ours.dtype)
        for theirs, chunk in zip(entry.chunks, ours.chunks, strict=True):
            assert (tuple(theirs.offsets), tuple(theirs.sizes)) == (chunk.offsets, chunk.sizes)
            place, mine = places[key, chunk.offsets], actual.places[key, chunk.offsets]
            assert (place.relative_path, place.offset, place.length) == tuple(mine)


def test_groups_with_objects_do_not_go_on_into_a_run(tmp_path: Path) -> None:
    from megatron_muon.mcore.checkpoint import read
    from megatron_muon.mcore.checkpoint.interop.switch import require_plain_groups

    file = io.BytesIO()
    torch.save({"param_groups": [{"lr": 0.1, "step": Touch(tmp_path)}]}, file)
    loaded = read.load(file.getvalue())
    with pytest.raises(ValueError, match=r"group's step is an object of posix\.system"):
        require_plain_groups(tmp_path, [loaded])


assert set(PICKLES) < set(ATTACKS)
