"""The file of a digest: complete or not, damaged, of another kind, or of another
model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_muon.mcore.load_check import digest, same_model
from megatron_muon.mcore.load_check.digest import DigestError, with_hash

CONTENT = {"wrote": {"world_size": 2}, "parameters": {}, "files": {}}


def test_begin_and_finish(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    for left in ("0123456789abcdef.1.part.json", "0123456789abcdef.contested"):
        (
            folder / f"megatron_muon.{left}"
        ).touch()  # by a save of an earlier version, killed
    (folder / "theirs").touch()
    digest.begin(folder, CONTENT["wrote"], digest.new_save())
    assert sorted(path.name for path in folder.iterdir()) == [
        digest.FILE_NAME,
        "theirs",
    ]
    read_back = digest.read(folder)
    assert read_back is not None and read_back["complete"] is False
    with pytest.raises(
        DigestError, match=r"is not complete: .* no other checkpoint that is known"
    ):
        digest.complete(folder)
    digest.finish(folder, CONTENT)
    read_back = digest.complete(folder)
    assert (
        read_back is not None
        and read_back["complete"] is True
        and read_back["format"] == 2
    )
    assert digest.last_complete(tmp_path) == 3


def test_the_mark_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "iter_0000001"
    other.write_text("theirs")
    folder.mkdir()
    (folder / digest.FILE_NAME).symlink_to(other)
    digest.begin(folder, {})
    assert (
        other.read_text() == "theirs" and not (folder / digest.FILE_NAME).is_symlink()
    )


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
    (tmp_path / digest.FILE_NAME).write_text(with_hash({"format": 3, "complete": True}))
    with pytest.raises(
        DigestError, match=r"is of format 3, this megatron_muon reads 2: use the"
    ):
        digest.read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"files": files}
            for files in ([1], {"x": 5}, {"x": {"size": 1}}, {"x": {"hash": "a"}})
        ),
        *(
            {"files": {name: {"size": 1, "hash": "a"}}}
            for name in ("/etc/passwd", "../x", "")
        ),
        *(
            {"files": {"x": {"size": size, "hash": "a"}}}
            for size in (-1, True, 10**400, "1")
        ),
        *(
            {"parameters": {"w": {"shape": [1], **odd}}}
            for odd in ({"optimizer": 5}, {})
        ),
        *(
            {"parameters": {"w": {"shape": of, "optimizer": "muon"}}}
            for of in ("1", ["1"], 1)
        ),
        {"wrote": [1]},
        {"settings": [1]},
        {"save": 5},
        {"save": {}},
        {"complete": "yes"},
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
    (folder / digest.FILE_NAME).write_text(with_hash(whole))
    with pytest.raises(DigestError, match="its values are not those of a digest"):
        digest.read(folder)
    assert digest.last_complete(tmp_path) is None and digest.saver(folder) is None


def _digest(shapes: dict[str, list[int]]) -> dict[str, Any]:
    table = {
        name: {"shape": shape, "optimizer": "muon"} for name, shape in shapes.items()
    }
    return {"parameters": table}


def _require(
    saved: dict[str, list[int]], own: dict[str, list[int]], exact: bool = True
) -> None:
    table = _digest(own)["parameters"]
    same_model.require_same_model(_digest(saved), table, "folder", exact)


def test_one_weight_of_experts_is_compared_by_its_shape() -> None:
    name, other = (
        "layers.0.mlp.experts.weight1",
        "layers.0.mlp.experts.linear_fc1.weight",
    )
    with pytest.raises(
        DigestError, match=r"shape \(64, 4096\) in the checkpoint, shape \(128, 2048\)"
    ):
        _require({name: [64, 4096]}, {name: [128, 2048]})
    _require({name: [64, 4096]}, {f"{other}0": [128, 1024], f"{other}1": [128, 1024]})
    with pytest.raises(DigestError, match="262144 elements in the checkpoint"):
        _require(
            {name: [64, 4096]}, {f"{other}0": [128, 1000], f"{other}2": [128, 1024]}
        )


def test_weights_alone_load_into_a_part_of_the_model() -> None:
    saved = {"one.weight": [4, 4], "two.weight": [4, 4]}
    with pytest.raises(
        DigestError, match=r"it has two\.weight, which this model lacks"
    ):
        _require(saved, {"one.weight": [4, 4]})
    _require(saved, {"one.weight": [4, 4]}, exact=False)


def test_a_digest_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has the same format: with more about the model, and before that without the
    save.
    """
    more = {"model": {"rotary_base": 10000}, "vocabulary": 128}
    digest.finish(tmp_path, {"parameters": {}, "files": {}, **more})
    earlier = digest.read(tmp_path)
    assert earlier is not None and earlier["complete"] and earlier["save"] is None


def test_earlier_versions_read_who_saves() -> None:
    kinds = {"id": str, "host": str, "began": str, "pid": int, "job": dict}
    assert {key: type(value) for key, value in digest.new_save().items()} == kinds
