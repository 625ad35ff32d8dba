"""The file of a digest and its parts: complete or not, damaged, or of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.load_check.digest import DigestError, sealed

CONTENT = {"wrote": {"world_size": 2}, "parameters": {}, "files": {}}


def test_begin_and_finish(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    for left in ("lock", "0123456789abcdef.1.part.json", "0123456789abcdef.contested"):
        (folder / f"megatron_muon.{left}").touch()  # by a save of an earlier version, killed
    (folder / "theirs").touch()
    digest.begin(folder, CONTENT["wrote"], digest.new_save())
    assert sorted(path.name for path in folder.iterdir()) == [digest.FILE_NAME, "theirs"]
    read_back = digest.read(folder)
    assert read_back is not None and read_back["complete"] is False
    with pytest.raises(DigestError, match=r"is not complete: .* no other checkpoint that is known"):
        digest.complete(folder)
    digest.finish(folder, CONTENT)
    read_back = digest.complete(folder)
    assert read_back is not None and read_back["complete"] is True and read_back["format"] == 2
    assert digest.complete_iterations(tmp_path) == [3]


def test_the_mark_replaces_a_link_and_leaves_what_it_points_to(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "iter_0000001"
    other.write_text("theirs")
    folder.mkdir()
    (folder / digest.FILE_NAME).symlink_to(other)
    digest.begin(folder, {})
    assert other.read_text() == "theirs" and not (folder / digest.FILE_NAME).is_symlink()


def test_the_way_out_names_the_last_complete_one(tmp_path: Path) -> None:
    for number in (2, 4, 9):
        digest.begin(tmp_path / f"iter_{number:07d}", {})
        if number != 9:
            digest.finish(tmp_path / f"iter_{number:07d}", CONTENT)
    with pytest.raises(DigestError, match="one beside it is 4: --ckpt-step 4 loads it"):
        digest.complete(tmp_path / "iter_0000009")


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


@pytest.mark.parametrize(
    "change",
    [
        *({"files": files} for files in ([1], {"x": 5}, {"x": {"size": 1}}, {"x": {"hash": "a"}})),
        *({"files": {name: {"size": 1, "hash": "a"}}} for name in ("/etc/passwd", "../x", "")),
        *({"files": {"x": {"size": size, "hash": "a"}}} for size in (-1, True, 10**400, "1")),
        *({"parameters": {"w": {"shape": [1], **odd}}} for odd in ({"optimizer": 5}, {})),
        *({"parameters": {"w": {"shape": of, "optimizer": "muon"}}} for of in ("1", ["1"], 1)),
        *({"wrote": [1]}, {"settings": [1]}, {"save": 5}, {"save": {}}, {"complete": "yes"}),
    ],
    ids=str,
)
def test_values_of_another_type_are_damage_whatever_the_hash(
    change: dict[str, object], tmp_path: Path
) -> None:
    """Also for the error of another checkpoint, which looks at its neighbours."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    whole = {"format": 2, "complete": True, **CONTENT, **change}
    (folder / digest.FILE_NAME).write_text(sealed(whole))
    with pytest.raises(DigestError, match="its values are not those of a digest"):
        digest.read(folder)
    assert digest.complete_iterations(tmp_path) == [] and digest.saver(folder) is None
