"""``megatron-muon checkpoint inspect`` on checkpoints of real runs: what it says, its status."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt import Case, Topology, held, inner_optimizers, muon_weights, start, take_step
from installed import lacks
from ranks import run
from saving import formats, save
from test_routes_command import flags_of
from whole import Whole, whole

from megatron_muon import digest
from megatron_muon.checksum import checksum
from megatron_muon.cli import main
from megatron_muon.cli.checkpoint_tensors import canonical

ROOT = Path(__file__).parent.parent
CASE = Case(steps=2)
DEFAULT, *_ = EVERY = formats()
SHARDED = [format for format in EVERY if format != "torch"]
DP2 = Topology(dp=2)
NAME = "decoder.layers.1.mlp.linear_fc1.weight"


def inspect(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """(exit status, the report)."""
    status = main(["checkpoint", "inspect", str(path), "--json", *options])
    return status, json.loads(capsys.readouterr().out)


def faults(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """All that is not complete, which must be the exit status, too."""
    status, report = inspect(path, capsys, *options)
    assert status == bool(report["faults"])
    return "\n".join(report["faults"])


def save_and_hold(
    case: Case, topology: Topology, format: str, folder: str, change: Callable[[Any], None] | None
) -> dict[str, Any]:
    """On a rank: save a run that has taken the case's steps; what it held."""
    built = start(case, topology)
    for step in range(case.steps):
        take_step(built, step)
    if change is not None:
        change(built)
    save(built, folder, format)
    return held(built)


def saved(
    folder: Path,
    format: str,
    topology: Topology = DP2,
    case: Case = CASE,
    change: Callable[[Any], None] | None = None,
) -> Whole:
    if lacking := lacks(case, topology):
        pytest.skip(lacking)
    args = (case, topology, format, str(folder), change)
    results = run(save_and_hold, topology.world_size, *args)
    return whole(results) if change is None else {}


# --- what it says -----------------------------------------------------------------------------

SHAPES = {
    "tp": (CASE, Topology(2, 1, 2, overlap=True)),
    "pp": (CASE, Topology(1, 2, 1)),
    "experts": (replace(CASE, moe=True), Topology(dp=2, ep=2)),
    "fp32": (replace(CASE, bf16=False), Topology(dp=2)),
}


@pytest.mark.parametrize("format", EVERY)
@pytest.mark.parametrize("shape", SHAPES)
def test_names_optimizers_and_norms_are_those_of_the_run(
    shape: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, topology = SHAPES[shape]
    truth = saved(tmp_path, format, topology, case)
    status, report = inspect(tmp_path, capsys)
    assert status == 0, report["faults"]
    assert report["facts"]["format"] == (format if format == "torch" else f"torch_dist, {format}")
    assert "momentum 0.95" in report["facts"]["settings"]
    rows = {row["name"]: row for row in report["parameters"]}
    names = {canonical(name): name for name in truth["main"]}
    assert rows.keys() == names.keys()
    for name, row in rows.items():
        is_muon = names[name] in muon_weights(case)
        assert row["optimizer"] == ("muon" if is_muon else "adamw")
        numel = truth["main"][names[name]].numel()
        found = torch.Size(row["shape"]).numel()
        assert found == numel or (row["is_part"] and found * topology.tp == numel)
        if not row["is_part"] and shape != "fp32" and format != "dp_zero_gather_scatter":
            assert found == numel
        if not is_muon:
            assert row["norm"] is None
            continue
        # float64 sums of the same numbers in other orders: n roundings of 2**-53 each at most
        expected = truth["exp_avg"][names[name]].double().square().sum().sqrt().item()
        assert row["norm"] == pytest.approx(expected, rel=numel * 2.0**-53)


@pytest.mark.parametrize("format", EVERY)
def test_bytes_by_kind(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = saved(tmp_path, format)
    _, report = inspect(tmp_path, capsys)
    sizes = report["bytes"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sizes["total"] == sum(path.stat().st_size for path in files)
    muons = muon_weights(CASE)
    numel = {name: tensor.numel() for name, tensor in truth["main"].items()}
    assert sizes["momentum"] == 4 * sum(numel[name] for name in muons)
    assert sizes["AdamW's moments"] == 8 * sum(numel[name] for name in numel.keys() - muons)
    assert sizes["model"] == 2 * sum(numel.values())
    padding = sizes["main parameters"] - 4 * sum(numel.values())
    assert 0 <= padding < 4 * 64 * len(numel)
    assert sizes["total"] == sum(sizes.values()) - sizes["total"]


@pytest.mark.parametrize("format", [DEFAULT, "torch"])
def test_matrices_come_from_the_models_arguments(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Megatron-LM saves them, beside the parameter groups."""
    topology = Topology(2, 1, 2)
    saved(tmp_path, format, topology)
    _, report = inspect(tmp_path, capsys)
    assert any("no matrices: the model's arguments" in note for note in report["notes"])
    _put_args(tmp_path, format, flags_of(CASE, topology))
    _, report = inspect(tmp_path, capsys)
    counts = {row["name"]: row["matrices"] for row in report["parameters"]}
    for name, count in counts.items():
        expected = 3 if "linear_qkv" in name else 1
        assert count == (expected if name in muon_weights(CASE) else None), name
    assert report["notes"] == ["no digest: that the files are as they were written is not known"]


def _put_args(folder: Path, format: str, flags: list[str]) -> None:
    import argparse

    from megatron.core.transformer import TransformerConfig

    from megatron_muon.cli.flags import add_megatron_flags

    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int)
    add_megatron_flags(parser, TransformerConfig)
    files = [folder / "common.pt"]
    if format == "torch":
        files = sorted(folder.glob("*model_optim.pt"))
    for file in files:
        held = torch.load(file, weights_only=False)
        torch.save({**held, "args": parser.parse_args(flags), "iteration": 7}, file)


def test_a_line_for_each_in_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.endswith("\ncomplete\n")
    (line,) = (line for line in text.split("\n") if line.startswith(NAME))
    assert "260 x 96" in line and "muon" in line


# --- where it looks ---------------------------------------------------------------------------


def test_the_tracker_file_leads_to_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    saved(folder, DEFAULT)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    for path in (tmp_path, folder):
        status, report = inspect(path, capsys)
        assert (status, report["facts"]["iteration"]) == (0, "3")
        assert report["facts"]["checkpoint"] == str(folder)
    shutil.copytree(folder, tmp_path / "iter_0000004")
    _, report = inspect(tmp_path / "iter_0000004", capsys)
    assert "the tracker file names iter_0000003, not this one" in report["notes"]
    tracker.write_text("5")
    assert "names iter_0000005, which is not there" in faults(tmp_path, capsys)
    tracker.write_text("")
    assert "names no iteration" in faults(tmp_path, capsys)


def test_no_checkpoint_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file.txt"):
        assert main(["checkpoint", "inspect", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "repair", str(tmp_path)])


# --- what is not complete ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gone", "cut off"])
@pytest.mark.parametrize("format", EVERY)
def test_every_file_is_needed(
    how: str, format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a digest, so from the files alone."""
    whole_one = tmp_path / "whole"
    whole_one.mkdir()
    saved(whole_one, format)
    for file in sorted(whole_one.iterdir()):
        if file.name == "metadata.json" and how == "cut off":
            continue  # nothing but a name is read of it
        copy = tmp_path / f"without{file.name}"
        shutil.copytree(whole_one, copy)
        if how == "gone":
            (copy / file.name).unlink()
        else:
            os.truncate(copy / file.name, file.stat().st_size // 2)
        assert file.name in faults(copy, capsys), file.name


def _nan_in_momentum(built: Any) -> None:
    for inner in inner_optimizers(built.optimizer):
        for state in inner.state.values():
            if "exp_avg_sq" not in state:
                state["exp_avg"][3] = float("nan")


@pytest.mark.parametrize("format", EVERY)
def test_a_momentum_that_is_not_finite(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, format, change=_nan_in_momentum)
    text = faults(tmp_path, capsys)
    for name in muon_weights(CASE):
        assert f"{name} has muon_momentum that is not finite" in text
    assert "exp_avg" not in text


def _inf_in_main(built: Any) -> None:
    for inner in inner_optimizers(built.optimizer):
        for group in inner.param_groups:
            for shard in group["params"]:
                if shard.numel() > 1000:
                    shard.data[3] = float("inf")


@pytest.mark.parametrize("format", EVERY)
def test_a_main_parameter_that_is_not_finite(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, format, change=_inf_in_main)
    text = faults(tmp_path, capsys)
    assert "param that is not finite" in text and "momentum" not in text


@pytest.mark.parametrize("format", SHARDED)
def test_a_key_that_is_gone(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metadata knows nothing of one momentum, or of one second moment."""
    if format == "dp_zero_gather_scatter":
        pytest.skip("its state is one object")
    saved(tmp_path, format)
    original = (tmp_path / ".metadata").read_bytes()
    for part, weight in ((".muon_momentum.", "linear_fc1.weight"), (".exp_avg_sq.", "embedding")):
        metadata = pickle.loads(original)
        keys = [key for key in metadata.state_dict_metadata if part in key and weight in key]
        assert keys
        for key in keys:
            del metadata.state_dict_metadata[key]
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        text = faults(tmp_path, capsys)
        if weight == "embedding":
            assert "word_embeddings.weight is AdamW's and has no exp_avg_sq" in text
        elif format == "dp_reshardable":
            assert ", have neither momentum nor Adam's moments" in text
            _, report = inspect(tmp_path, capsys)
            assert any(NAME in note and "frozen, or missing" in note for note in report["notes"])
        else:
            assert f"{NAME} has a main parameter, but neither momentum" in text


def _edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "0_0_0_distrib_optim.pt"
    saved = torch.load(file)
    (buffer,) = saved[0].values()
    change(buffer["state"])
    torch.save(saved, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(NAME), ", have neither momentum nor Adam's moments"),
        (
            lambda s: s[NAME].update(muon_momentum=s[NAME]["muon_momentum"].bfloat16()),
            f"muon_momentum of {NAME} is torch.bfloat16, not torch.float32",
        ),
        (
            lambda s: s["output_layer.weight"].pop("exp_avg_sq"),
            "output_layer.weight is AdamW's and has no exp_avg_sq",
        ),
    ],
    ids=["missing", "bf16", "second moment"],
)
def test_state_that_is_wrong_in_the_torch_format(
    change: Callable[[dict[str, Any]], Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path, "torch")
    _edit(tmp_path, change)
    assert message in faults(tmp_path, capsys)


def _bf16_on_disk(built: Any) -> None:
    """As an optimizer that keeps its momentum in bf16 would save it."""
    for inner in inner_optimizers(built.optimizer):
        for state in inner.state.values():
            if "exp_avg_sq" not in state:
                state["exp_avg"] = state["exp_avg"].bfloat16()


@pytest.mark.skipif(DEFAULT != "dp_reshardable", reason="others gather into fp32")
def test_a_momentum_of_another_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT, change=_bf16_on_disk)
    assert f"muon_momentum of {NAME} is torch.bfloat16, not torch.float32" in faults(
        tmp_path, capsys
    )


# --- with a digest ----------------------------------------------------------------------------


def _seal(folder: Path, truth: Whole, **other: Any) -> None:
    """A digest of what is there, as a save writes it."""
    names = [path.name for path in folder.iterdir() if not digest.own_file(path.name)]
    said = {
        "wrote": {"megatron_muon": "9.8.7", "world_size": 2},
        "optimizer": "muon",
        "settings": {"momentum": 0.5},
        "parameters": {
            name: {
                "shape": list(tensor.shape),
                "optimizer": "muon" if name in muon_weights(CASE) else "adamw",
            }
            for name, tensor in truth["main"].items()
        },
        "files": {name: digest.describe(folder / name, checksum) for name in names},
    }
    digest.finish(folder, {**said, **other})


@pytest.mark.parametrize("format", EVERY)
def test_what_the_digest_says_is_believed(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, format, Topology(2, 1, 2))
    _seal(tmp_path, truth)
    status, report = inspect(tmp_path, capsys, "--hash")
    assert status == 0, report["faults"]
    assert "megatron_muon 9.8.7" in report["facts"]["written by"]
    assert report["facts"]["settings"] == "momentum 0.5"
    rows = {row["name"]: row for row in report["parameters"]}
    assert rows.keys() == {canonical(name) for name in truth["main"]}
    for name, tensor in truth["main"].items():
        row = rows[canonical(name)]
        assert (tuple(row["shape"]), row["is_part"]) == (tuple(tensor.shape), False)
    expected = truth["exp_avg"][NAME].double().square().sum().sqrt().item()
    assert rows[NAME]["norm"] == pytest.approx(expected, rel=1e-11)  # see above


def test_files_are_held_against_the_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, "torch")
    _seal(tmp_path, truth)
    file = tmp_path / "0_0_0_model_optim.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "is damaged" in faults(tmp_path, capsys, "--hash")
    file.write_bytes(data[:-1])
    assert f"{file} has {len(data) - 1} bytes, {len(data)} were written" in faults(tmp_path, capsys)
    file.unlink()
    assert f"{file} is missing" in faults(tmp_path, capsys)


def test_parameters_are_held_against_the_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = saved(tmp_path, DEFAULT)
    said = {
        name: {"shape": list(t.shape), "optimizer": "adamw"} for name, t in truth["main"].items()
    }
    for name in muon_weights(CASE):
        said[name]["optimizer"] = "muon"
    wrong = {**said, "lost.weight": {"shape": [3, 4], "optimizer": "muon"}}
    wrong[NAME] = {"shape": [260, 97], "optimizer": "muon"}
    wrong["output_layer.weight"] = {**said["output_layer.weight"], "optimizer": "muon"}
    _seal(tmp_path, truth, parameters=wrong)
    text = faults(tmp_path, capsys)
    assert "lost.weight is Muon's and has no momentum" in text
    assert f"muon_momentum of {NAME} has 24960 elements, not 25220" in text
    assert "output_layer.weight has state of adamw, but the digest says muon" in text
    assert text.count("\n") == 3  # and "output_layer.weight is Muon's and has no momentum"


def test_a_save_that_did_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    digest.begin(tmp_path, {})
    assert "was stopped before its end" in faults(tmp_path, capsys)


def test_a_hash_needs_a_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT)
    (tmp_path / digest.FILE_NAME).unlink(missing_ok=True)
    assert "no digest to hold hashes against" in faults(tmp_path, capsys, "--hash")


# --- whatever is in the files -----------------------------------------------------------------


class Touch:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("format", [DEFAULT, "torch"])
def test_nothing_that_is_pickled_is_run(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    saved(folder, format)
    trace = tmp_path / "trace"
    for file in [folder / "common.pt"] if format != "torch" else folder.glob("*model_optim.pt"):
        torch.save({**torch.load(file, weights_only=False), "more": Touch(trace)}, file)
        torch.load(file, weights_only=False)
        assert trace.exists()
        trace.unlink()
    status, _ = inspect(folder, capsys)
    assert status == 0 and not trace.exists()


def test_an_adamw_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, DEFAULT, case=replace(CASE, optimizer="adam"))
    status, report = inspect(tmp_path, capsys)
    assert status == 0
    assert report["facts"]["optimizer"] == "AdamW"
    assert report["facts"]["written by"] == "a Megatron without megatron_muon"
    assert report["bytes"]["momentum"] == 0


@pytest.mark.parametrize("format", EVERY)
def test_as_a_program_by_itself(format: str, tmp_path: Path) -> None:
    """No launcher's environment and no GPU."""
    saved(tmp_path, format)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "CUDA_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "megatron_muon.cli", "checkpoint", "inspect", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "\ncomplete" in done.stdout
