"""``megatron-muon checkpoint inspect`` on damage: a line that names the file, never a traceback."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.lab.commands import main
from megatron_muon.mcore.load_check import digest
from support.checkpoints.inspecting import CASE, EVERY, faults, inspect
from support.checkpoints.roots import TRACKER, make_roots


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_roots(tmp_path_factory.mktemp("roots"))


def test_the_checkpoints_are_whole_without_it(
    roots: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for root in roots:
        status, report = inspect(root, capsys)
        assert status == 0, report["faults"]


# --- cases by name --------------------------------------------------------------------------------


@pytest.fixture(params=range(4), ids=["torch_dist", "torch_dist sealed", "torch", "torch sealed"])
def root(roots: list[Path], request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(roots[request.param], tmp_path / "root"))


METADATA: dict[str, Callable[[Any], Any]] = {
    "a number": lambda metadata: 3,
    "a dict": lambda metadata: {"state_dict_metadata": {}, "storage_data": {}},
    "state_dict_metadata": lambda metadata: setattr(metadata, "state_dict_metadata", 3),
    "storage_data": lambda metadata: setattr(metadata, "storage_data", [1]),
    "an entry": lambda metadata: metadata.state_dict_metadata.update({"x": 3}),
    "a key": lambda metadata: metadata.state_dict_metadata.update({3: None}),
    "a place": lambda metadata: metadata.storage_data.update({"x": 3}),
    "chunks": lambda metadata: [
        setattr(entry, "chunks", 3) for entry in metadata.state_dict_metadata.values()
    ],
    "properties": lambda metadata: [
        setattr(entry, "properties", None)
        for entry in metadata.state_dict_metadata.values()
        if hasattr(entry, "properties")
    ],
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_with_other_things_in_them(
    what: str, roots: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(roots[0] / "iter_0000003", tmp_path / "copy"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    instead = METADATA[what](metadata)
    whole = instead if isinstance(instead, (int, dict)) else metadata
    (folder / ".metadata").write_bytes(pickle.dumps(whole))
    assert ".metadata cannot be read: " in faults(folder, capsys)


def test_swapped_files(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with each that is of another kind, or of other sizes."""
    folder = root / "iter_0000003"
    names = sorted(path.name for path in folder.iterdir() if path.name != digest.FILE_NAME)
    pairs = [(one, two) for at, one in enumerate(names) for two in names[:at]]
    for one, two in pairs:
        if one.split("_")[-1] == two.split("_")[-1]:  # of two ranks: only a digest can tell
            continue
        data = {name: (folder / name).read_bytes() for name in (one, two)}
        (folder / one).write_bytes(data[two])
        (folder / two).write_bytes(data[one])
        said = faults(root, capsys)
        assert one in said or two in said
        for name in data:
            (folder / name).write_bytes(data[name])
    assert faults(root, capsys) == ""


@pytest.mark.parametrize(
    "saved_object",
    [3, [1], {}, {"model": 3}, {"model": {}, "optimizer": 3}, {0: {}}, {0: {("a",): 3}},
     {"model": {}, "optimizer": {"optimizer": {"param_groups": 3}}},
     {"model": {}, "optimizer": {"megatron_muon": 3}},
     {"model": {}, "optimizer": {"megatron_muon": {"settings": {"a": {"b": 1}}}}},
     {0: {("a",): {"exp_avg": 3, "state": {"x": {"y": torch.ones(1)}}}}},
     [{0: {"a": {"state": {"x": {"exp_avg": 1}}}}}]],
    ids=str,
)  # fmt: skip
def test_files_that_hold_something_else(
    saved_object: Any, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What holds no fault for one file may be one for the other."""
    folder = root / "iter_0000003"
    for file in sorted(folder.glob("*.pt")):
        original = file.read_bytes()
        torch.save(saved_object, file)
        status = main(["checkpoint", "inspect", str(root)])
        out, err = capsys.readouterr()
        assert status in (0, 1) and not err, err
        assert status == 0 or file.name in out
        file.write_bytes(original)


def test_chains_without_end(roots: list[Path], tmp_path: Path) -> None:
    from megatron_muon.mcore.checkpoint.interop.foreign import states_of

    endless: list[Any] = []
    endless.append(endless)
    wide: Any = [{"optimizer": {}}]
    for _ in range(30):
        wide = [wide, wide]
    for saved_chain in (endless, wide, [[[[[{}]]]]]):
        with pytest.raises(ValueError, match="no chain"):
            states_of(saved_chain)
    assert states_of([[{"a": 1}], {0: {"b": 2}}, None]) == [{"a": 1}, {"b": 2}]


# --- where it looks -------------------------------------------------------------------------------


def test_several_checkpoints_are_never_taken_for_one(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(root / "iter_0000003", root / "iter_0000004")
    (root / TRACKER).unlink()
    assert main(["checkpoint", "inspect", str(root)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert f"{root} has no checkpoint in it, and no {TRACKER}: give the folder" in said.err
    assert inspect(root / "iter_0000004", capsys)[0] == 0


def test_of_the_format_torch_one_iteration_is_read(
    roots: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron-LM names them; what lies deeper is not of it."""
    source = roots[2] / "iter_0000003"
    folder = tmp_path / "iter_0000003"
    for parent, rank in ((p, rank) for p in (folder, folder / "iter_0000002") for rank in (0, 1)):
        where = parent / f"mp_rank_0{rank}"
        where.mkdir(parents=True)
        shutil.copy(source / f"{rank}_0_0_model_optim.pt", where / "model_optim_rng.pt")
        shutil.copy(source / f"{rank}_0_0_distrib_optim.pt", where / "distrib_optim.pt")
    _, once = inspect(source, capsys)
    status, report = inspect(folder, capsys)
    assert (status, report["bytes"]["momentum"]) == (0, once["bytes"]["momentum"])


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_no_path_is_not_the_current_folder(
    path: str, roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(roots[0])
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "inspect", path])


# --- exit status ----------------------------------------------------------------------------------


def test_a_fault_of_its_own_has_a_status_of_its_own(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_muon.lab.inspect import command

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a mistake\nof ours")

    monkeypatch.setattr(command, "examine", fails)
    assert main(["checkpoint", "inspect", str(roots[0])]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert str(roots[0]) in said.err and "TypeError: a mistake of ours" in said.err


def test_help_lists_every_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["checkpoint", "--help"])
    text = capsys.readouterr().out
    for status in range(4):
        assert f"\n  {status}  " in text


def test_an_encoding_that_lacks_letters(
    roots: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the C locale: a name of another alphabet is escaped, not a UnicodeEncodeError."""
    root = Path(shutil.copytree(roots[1], tmp_path / "Прогон"))
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["checkpoint", "inspect", str(root)]) == 0
    sys.stdout.flush()
    assert rb"\u041f\u0440" in out.getvalue()


assert CASE.steps and "torch" in EVERY
