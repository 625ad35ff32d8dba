"""The file of a digest: complete or not, damaged, of another kind, or of another
model.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_muon.mcore.checkpoint import manifest
from megatron_muon.mcore.checkpoint.manifest import DigestError, with_hash
from megatron_muon.mcore.checkpoint.matrices import (
    Table,
    add_matrices,
    require_same_matrices,
)

CONTENT = {"wrote": {"world_size": 2}, "record": None, "files": {}}


def finish(folder: Path) -> None:
    manifest.finish(folder, manifest.begin(folder), CONTENT)


def test_begin_and_finish(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (folder / "theirs").touch()
    mark = manifest.begin(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        manifest.FILE_NAME,
        "theirs",
    ]
    read_back = manifest.read(folder)
    assert read_back is not None and read_back["complete"] is False
    with pytest.raises(
        DigestError, match=r"is not complete: .* no other checkpoint that is known"
    ):
        manifest.complete(folder)
    manifest.finish(folder, mark, CONTENT)
    read_back = manifest.complete(folder)
    assert (
        read_back is not None
        and read_back["complete"] is True
        and read_back["format"] == 3
    )
    assert manifest.last_complete(tmp_path) == 3


def test_the_mark_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "iter_0000001"
    other.write_text("theirs")
    folder.mkdir()
    (folder / manifest.FILE_NAME).symlink_to(other)
    manifest.begin(folder)
    assert (
        other.read_text() == "theirs" and not (folder / manifest.FILE_NAME).is_symlink()
    )


def test_the_way_out_names_the_last_complete_one(tmp_path: Path) -> None:
    for number in (2, 4, 9):
        folder = tmp_path / f"iter_{number:07d}"
        manifest.begin(folder) if number == 9 else finish(folder)
    with pytest.raises(DigestError, match="one beside it is 4: --ckpt-step 4 loads it"):
        manifest.complete(tmp_path / "iter_0000009")


def test_every_changed_character_of_it_is_seen(tmp_path: Path) -> None:
    finish(tmp_path)
    path = tmp_path / manifest.FILE_NAME
    text = path.read_bytes()
    for at in range(len(text)):
        path.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        with pytest.raises(DigestError, match=r"is damaged|is of format"):
            manifest.read(tmp_path)
    for at in range(len(text) - 1):
        path.write_bytes(text[:at])
        with pytest.raises(DigestError, match="is damaged"):
            manifest.read(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / manifest.FILE_NAME).write_text(
        with_hash({"format": 4, "complete": True})
    )
    with pytest.raises(
        DigestError, match=r"is of format 4, this megatron_muon reads 3: use the"
    ):
        manifest.read(tmp_path)


CHANGES = """
{"files": [1]}
{"files": {"x": 5}}
{"files": {"x": {"size": 1}}}
{"files": {"x": {"hash": "a"}}}
{"files": {"/etc/passwd": {"size": 1, "hash": "a"}}}
{"files": {"../x": {"size": 1, "hash": "a"}}}
{"files": {"": {"size": 1, "hash": "a"}}}
{"files": {"x": {"size": -1, "hash": "a"}}}
{"files": {"x": {"size": true, "hash": "a"}}}
{"files": {"x": {"size": HUGE, "hash": "a"}}}
{"files": {"x": {"size": "1", "hash": "a"}}}
{"record": {"settings": {}, "matrices": [1]}}
{"record": {"settings": {}, "matrices": {"w": 5}}}
{"record": {"settings": {}, "matrices": {"w": {"1": 2}}}}
{"record": {"settings": {}, "matrices": {"w": {"1 x 2 x 3": 1}}}}
{"record": {"settings": {}, "matrices": {"w": {"a x 2": 1}}}}
{"record": {"settings": {}, "matrices": {"w": {"1 x 2": "many"}}}}
{"record": {"settings": {}, "matrices": {"w": {"1 x 2": null}}}}
{"record": 5}
{"record": []}
{"record": {}}
{"record": {"settings": [1]}}
{"wrote": [1]}
{"complete": "yes"}
"""


@pytest.mark.parametrize("change", CHANGES.strip().splitlines())
def test_values_of_another_type_are_damage_whatever_the_hash(
    change: str, tmp_path: Path
) -> None:
    """Also for the error of another checkpoint, which looks at its neighbours."""
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    changed = json.loads(change.replace("HUGE", str(10**400)))
    whole = {"format": 3, "complete": True, **CONTENT, **changed}
    (folder / manifest.FILE_NAME).write_text(with_hash(whole))
    with pytest.raises(DigestError, match="is damaged: it is not what was written"):
        manifest.read(folder)
    assert manifest.last_complete(tmp_path) is None


def _table(shapes: dict[str, tuple[int, int]]) -> Table:
    table: Table = {}
    for name, shape in shapes.items():
        add_matrices(table, name, shape, 1)
    return table


def _require(
    saved: dict[str, tuple[int, int]], own: dict[str, tuple[int, int]]
) -> None:
    then, now = ({"settings": {}, "matrices": _table(each)} for each in (saved, own))
    require_same_matrices(then, now, "folder")


NAMES = {
    "of each class": [
        ("layers.0.mlp.experts.weight1", (64, 4096)),
        ("layers.0.mlp.experts.weight2", (4096, 64)),
    ],
    "one by one": [
        (f"layers.0.mlp.experts.local_experts.{at}.linear_{name}.weight", (128, 1024))
        for at in range(2)
        for name in ("fc1", "fc2")
    ],
    "numbered": [
        (f"layers.0.mlp.experts.linear_{name}.weight{at}", (128, 1024))
        for at in range(2)
        for name in ("fc1", "fc2")
    ],
}


@pytest.mark.parametrize("saved", NAMES)
@pytest.mark.parametrize("own", NAMES)
def test_experts_of_another_class_have_the_same_matrices(saved: str, own: str) -> None:
    _require(dict(NAMES[saved]), dict(NAMES[own]))
    *others, (name, _) = NAMES[own]
    with pytest.raises(ValueError, match=r"experts\.linear_fc2\.weight and has"):
        _require(dict(NAMES[saved]), dict(others) | {name: (128, 1000)})


def test_a_weight_that_only_one_of_them_has_is_refused() -> None:
    saved = {"one.weight": (4, 4), "two.weight": (4, 4)}
    with pytest.raises(
        ValueError, match=r"Muon had 1 of 4 x 4 in two\.weight and has nothing in this"
    ):
        _require(saved, {"one.weight": (4, 4)})
    with pytest.raises(
        ValueError, match=r"Muon had nothing in two\.weight and has 1 of 4 x 4 in this"
    ):
        _require({"one.weight": (4, 4)}, saved)


def test_another_padding_of_the_vocabulary_is_the_same() -> None:
    _require({"output_layer.weight": (128, 8)}, {"output_layer.weight": (144, 8)})


@pytest.mark.parametrize("complete", [True, False])
def test_a_digest_of_0_2_0_is_read(complete: bool, tmp_path: Path) -> None:
    """It has parameters and settings, and no record."""
    content = {
        "format": 2,
        "complete": complete,
        "wrote": {"world_size": 2},
        "save": {"id": "0123", "host": "node", "pid": 1, "job": {}, "began": ""},
        "optimizer": "muon",
        "settings": {"momentum": 0.95},
        "parameters": {"one.weight": {"shape": [4, 4], "optimizer": "muon"}},
        "files": {},
    }
    (tmp_path / manifest.FILE_NAME).write_text(with_hash(content))
    earlier = manifest.read(tmp_path)
    assert earlier is not None and earlier["complete"] is complete
    assert earlier["record"] is None


def test_what_another_save_has_marked_is_completed_by_none(tmp_path: Path) -> None:
    first = manifest.begin(tmp_path)
    second = manifest.begin(tmp_path)
    for mark in (first, second):
        with pytest.raises(RuntimeError, match="may contain files of two saves"):
            manifest.finish(tmp_path, mark, CONTENT)
    (tmp_path / manifest.FILE_NAME).unlink()
    with pytest.raises(RuntimeError, match="or somebody has removed"):
        manifest.finish(tmp_path, first, CONTENT)
    with pytest.raises(DigestError, match="is not complete"):
        manifest.complete(tmp_path)
