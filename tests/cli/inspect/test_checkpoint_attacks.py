"""No byte of a checkpoint chooses code that runs: in ``inspect``, and in our loads of training.

Each attack is tried on what trusts files first, so that a canary that stays away means something.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.mcore.load_check import digest
from support.checkpoints.attacks import ATTACKS, Touch, trusted
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
def _in_place_of(file: Path, data: bytes) -> Iterator[None]:
    """Within it a file has other bytes."""
    original = file.read_bytes()
    file.write_bytes(data)
    yield
    file.write_bytes(original)


_READ = (".metadata", "common.pt", "model_optim_rng.pt")  # without a digest, before anything else


@pytest.mark.parametrize("attack", ATTACKS)
def test_inspect_runs_nothing_of_any_file(
    attack: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary"
    data = _replaced(folder, attack, canary)
    for name in one_of_each_kind(folder):
        with _in_place_of(folder / name, data):
            _, said = inspected(folder, capsys)
        assert not canary.exists(), f"{name} ran"
        # an archive is read, but for the object that is of no known class; shards are not
        assert attack == "archive" or Path(name).name not in _READ or name in said
    if (folder / ".metadata").exists():  # an object among the shards
        entries = _metadata_of(folder).state_dict_metadata
        _put_object(
            folder,
            next(k for k in entries if ".megatron_muon/" in k and _is_object(entries[k])),
            data,
        )
        _, said = inspected(folder, capsys)
        assert not canary.exists() and (attack == "archive" or "cannot be read" in said)


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


@pytest.mark.parametrize("attack", ATTACKS)
def test_training_runs_nothing_before_megatron_does(
    attack: str, sealed: Path, tmp_path: Path
) -> None:
    folder = sealed
    canary = tmp_path / "canary"
    data = _replaced(folder, attack, canary)
    names = ["mp_rank_00/model_optim_rng.pt"]
    if (folder / ".metadata").exists():
        beside = folder.glob("common.pt")  # from core 0.19 on an object among the tensors
        names = [".metadata", digest.FILE_NAME, *(path.name for path in beside)]
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

    saved = Saved.of(folder)
    assert saved.writer == "muon" and saved.foreign_writer is None
    assert saved.record()["settings"]["momentum"] == 0.95
    if not (folder / ".metadata").exists():
        return
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    expected, actual = FileSystemReader(folder).read_metadata(), saved.metadata
    assert expected.state_dict_metadata.keys() == set(actual.keys)
    objects = {at.fqn: info for at, info in expected.storage_data.items() if at.offset is None}
    assert objects.keys() == actual.places.keys()
    for key, place in objects.items():
        here = (place.relative_path, place.offset, place.length)
        assert here == tuple(actual.places[key])


def test_groups_with_objects_do_not_go_on_into_a_run(tmp_path: Path) -> None:
    from megatron_muon.mcore.checkpoint import read
    from megatron_muon.mcore.checkpoint.interop.switch import require_plain_groups

    file = io.BytesIO()
    torch.save({"param_groups": [{"lr": 0.1, "step": Touch(tmp_path)}]}, file)
    loaded = read.load(file.getvalue())
    with pytest.raises(ValueError, match=r"group's step is an object of posix\.system"):
        require_plain_groups(tmp_path, [loaded])
