"""The digest around saves and loads: every damage is refused on every rank."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_muon.mcore.checkpoint import manifest
from support.checkpoints import saving
from support.checkpoints.saving import formats, save_new
from support.checkpoints.sealing import (
    KINDS,
    Corruption,
    corrupt,
    errors_of_loads,
    loaded,
    saved,
)
from support.installed import installed
from support.models.gpt import (
    Case,
    Topology,
    muon_weights,
    on_ranks,
    printed_by,
    start,
    take_step,
)
from support.ranks import RankError, run
from support.runs.topologies import DP2

CASE = Case(steps=2)
FORMATS = formats()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved folder of a format, made once."""

    @cache
    def of(format: str) -> Path:
        folder = tmp_path_factory.mktemp(format)
        on_ranks(saved, CASE, DP2, format, folder)
        return folder

    return of


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_saved_is_loaded(format: str, checkpoint: Any, tmp_path: Path) -> None:
    kept = manifest.read(checkpoint(format))
    assert kept is not None and kept["complete"]
    matrices = kept["record"]["matrices"]
    assert matrices.keys() == muon_weights(CASE)
    qkv = matrices["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv == {"96 x 96": 1, "32 x 96": 2}
    assert kept["record"]["settings"]["rule"] == "muon"
    files = {
        str(path.relative_to(checkpoint(format))): path
        for path in checkpoint(format).rglob("*")
        if path.is_file() and path.name != manifest.FILE_NAME
    }
    assert kept["files"].keys() == files.keys()
    for name, path in files.items():
        assert kept["files"][name]["size"] == path.stat().st_size
        assert kept["files"][name]["hash"] == manifest.file_hash(path)
    for result in on_ranks(loaded, CASE, DP2, format, checkpoint(format)):
        assert result["error"] is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_corruptions(
    format: str, block: int, checkpoint: Any, tmp_path: Path
) -> None:
    """3 of each format, behind the marker 67 more: all refused, on every rank, by
    name.
    """
    seeds = range(3) if block == 0 else range(3, 70)
    done: list[Corruption] = []
    folders = []
    for seed in seeds:
        folder = tmp_path / f"iter_{seed:07d}"
        shutil.copytree(checkpoint(format), folder)
        done.append(corrupt(folder, seed + 1000 * FORMATS.index(format)))
        folders.append(folder)
    results = on_ranks(errors_of_loads, CASE, DP2, format, folders, timeout=1200.0)
    for rank, errors in enumerate(results):
        for corruption, folder, error in zip(done, folders, errors, strict=True):
            assert error is not None, (rank, corruption)
            named = [name for name in corruption.files if f"{folder}/{name} " in error]
            assert named, error
            expected = "is missing" if corruption.kind == "delete" else "bytes"
            assert expected in error, error
    kinds = {corruption.kind for corruption in done}
    assert kinds == set(KINDS) or block == 0


def test_an_incomplete_one_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000007"
    shutil.copytree(checkpoint(FORMATS[0]), folder)
    shutil.copytree(checkpoint(FORMATS[0]), tmp_path / "iter_0000005")
    manifest.begin(folder)
    for errors in on_ranks(errors_of_loads, CASE, DP2, FORMATS[0], [folder]):
        assert re.search(
            r"iter_0000007 is not complete: .* --ckpt-step 5 loads it", errors[0]
        )


OTHER_MODELS = {
    "layers": (replace(CASE, layers=4), "nothing in decoder.layers.2"),
    "gated": (
        replace(CASE, gated=True),
        "1 of 260 x 96 in decoder.layers.0.mlp.linear_fc1.weight and has "
        "1 of 520 x 96 in this run",
    ),
    "experts": (replace(CASE, moe=True), "nothing in decoder.layers.0.mlp.experts"),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
@pytest.mark.parametrize("format", [FORMATS[0], "torch"])
def test_another_model_is_refused(other: str, format: str, checkpoint: Any) -> None:
    case, message = OTHER_MODELS[other]
    for errors in on_ranks(errors_of_loads, case, DP2, format, [checkpoint(format)]):
        assert re.search(message, errors[0] or ""), errors


@pytest.mark.parametrize("format", [FORMATS[0], "torch"])
def test_another_routing_is_refused_with_the_settings_of_the_save(
    format: str, checkpoint: Any, tmp_path: Path
) -> None:
    """Both ways, on every rank, before anything is read."""
    few = CASE.with_muon(muon_exclude=("*.linear_fc1.weight",))
    on_ranks(saved, few, DP2, format, tmp_path)
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    ways = (
        (
            few,
            checkpoint(format),
            "1 of 260 x 96 in {} and has nothing in this run .1 more .* had neither. To",
        ),
        (
            CASE,
            tmp_path,
            r"nothing in {} and has 1 of .* had --muon-exclude '\*\.linear_fc1\.weight'\. ",
        ),
    )
    for case, folder, said in ways:
        for errors in on_ranks(errors_of_loads, case, DP2, format, [folder]):
            text = errors[0] or ""
            assert re.search(
                f"another routing: Muon had {said.format(weight)}", text
            ), text
            assert (
                "muon_exclude (--muon-exclude) as at the save" in text
                and "TP, PP" not in text
            )


@pytest.mark.parametrize("format", FORMATS)
def test_without_a_digest_another_routing_is_among_the_causes(
    format: str, tmp_path: Path
) -> None:
    off = CASE.with_muon(checkpoint_digest=False)
    few = off.with_muon(muon_exclude=("*.linear_fc1.weight",))
    on_ranks(saved, off, DP2, format, tmp_path)
    for errors in on_ranks(errors_of_loads, few, DP2, format, [tmp_path]):
        assert "muon_exclude (--muon-exclude)" in (errors[0] or ""), errors


def _loads_without(
    case: Case, topology: Topology, format: str, folder: Path
) -> tuple[Any, str]:
    result, printed = printed_by(lambda: loaded(case, topology, format, folder))
    return result["error"], printed


def test_without_a_digest_there_is_one_warning(tmp_path: Path) -> None:
    on_ranks(save_new, CASE, DP2, FORMATS[0], tmp_path)  # the hooks are not in place
    assert manifest.read(tmp_path) is None
    printed = []
    for error, text in on_ranks(_loads_without, CASE, DP2, FORMATS[0], tmp_path):
        assert error is None
        printed.append(re.findall(r"was saved without a digest", text))
    assert [len(lines) for lines in printed] == [1, 0]


def test_switched_off_there_is_none(checkpoint: Any, tmp_path: Path) -> None:
    off = CASE.with_muon(checkpoint_digest=False)
    on_ranks(saved, off, DP2, FORMATS[0], tmp_path)
    assert manifest.read(tmp_path) is None
    shutil.copytree(checkpoint(FORMATS[0]), tmp_path / "damaged")
    content = json.loads((tmp_path / "damaged" / manifest.FILE_NAME).read_text())
    (tmp_path / "damaged" / manifest.FILE_NAME).write_text(
        json.dumps(content | {"format": 7})
    )
    (error, text), _ = on_ranks(
        _loads_without, off, DP2, FORMATS[0], tmp_path / "damaged"
    )
    # neither checked nor missed
    assert error is None and "without a digest" not in text


def test_a_save_into_it_marks_it_incomplete_first(tmp_path: Path) -> None:
    """A rank that stops in the middle leaves a folder that is refused."""
    with pytest.raises(RankError, match="here it stops"):
        on_ranks(_stops_in_a_save, CASE, DP2, FORMATS[0], tmp_path)
    interrupted = manifest.read(tmp_path)
    assert interrupted is not None and not interrupted["complete"]


def _stops_in_a_save(case: Case, topology: Topology, format: str, folder: Path) -> None:
    from megatron.core.dist_checkpointing import serialization

    with mock.patch.object(
        serialization, "save_preprocess", side_effect=OSError("here it stops")
    ):
        saved(case, topology, format, folder)


def _meets_another_save(
    case: Case, topology: Topology, format: str, folder: Path
) -> str:
    """Another save marks the folder after this one has written, before it is sealed."""
    finish = manifest.finish

    def meets(*args: Any) -> None:
        manifest.begin(folder)
        finish(*args)

    with (
        mock.patch.object(manifest, "finish", meets),
        pytest.raises(RuntimeError) as caught,
    ):
        saved(case, topology, format, folder)
    return str(caught.value)


@pytest.mark.parametrize("format", [FORMATS[0], "torch"])
def test_what_two_saves_wrote_is_not_sealed_by_either(
    format: str, tmp_path: Path
) -> None:
    for error in on_ranks(_meets_another_save, CASE, DP2, format, tmp_path):
        assert "may contain files of two saves, so it is not complete" in error
    left = manifest.read(tmp_path)
    assert left is not None and not left["complete"]
    for (error_of_load,) in on_ranks(errors_of_loads, CASE, DP2, format, [tmp_path]):
        assert "is not complete" in (error_of_load or "")


def _addresses_of_an_adamw_run(folder: Path) -> bool:
    """A run of AdamW's in a process that has the plugin: no digest, and nothing asked
    of others.
    """
    built = start(replace(CASE, optimizer="adam"), DP2)
    take_step(built, 0)  # core 0.12 saves no state that is not there yet
    with installed():
        saving.save(built, folder, FORMATS[0])
    return (folder / manifest.FILE_NAME).exists()


def test_adamws_checkpoints_have_none(tmp_path: Path) -> None:
    assert run(_addresses_of_an_adamw_run, 2, tmp_path) == [False, False]
