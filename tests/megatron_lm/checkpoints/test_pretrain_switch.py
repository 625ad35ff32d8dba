"""From AdamW to Muon and back in the real ``pretrain_gpt.py``: needs a checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from support.megatron_lm.scripts import (
    MUON,
    PATHS,
    losses,
    needs_checkout,
    needs_torch_dist,
    pretrain,
    version,
    without_plugin,
)

pytestmark = [needs_checkout, pytest.mark.timeout(1500)]
ADAM = "--optimizer adam --use-distributed-optimizer"
FORMATS = ["torch", pytest.param("torch_dist", marks=pytest.mark.slow)]


def options(folder: Path, format: str) -> str:
    """Four steps, saved, from where the last run has stopped."""
    needs_torch_dist(format)
    schedule = f"--train-iters 12 --lr-decay-iters 12 --bf16 --ckpt-format {format}"
    return (
        f"{schedule} --save {folder} --load {folder} --save-interval 100 "
        "--exit-interval 4"
    )


def saved_and_unswitched(optimizer: str, saved: Path, format: str) -> list[float]:
    """Saves four steps, and takes four more from a copy; returns the losses of these.

    A loss is that of the weights before the step, so the first after a load tells them.
    """
    pretrain(2, optimizer, options(saved, format))
    copy = saved.with_name("unswitched")
    shutil.copytree(saved, copy)
    return losses(pretrain(2, optimizer, options(copy, format)))


def assert_switched(text: str, unswitched: list[float]) -> None:
    """A run with other steps from the same weights."""
    switched = losses(text)
    assert switched[0] == unswitched[0] and switched[1:] != unswitched[1:]


@pytest.mark.parametrize("format", FORMATS)
def test_adamw_to_muon_and_on(format: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    unswitched = saved_and_unswitched(ADAM, saved, format)
    text = pretrain(2, MUON, options(saved, format), fails=True)
    assert "has AdamW's optimizer state: give --muon-from-adamw" in text and not losses(
        text
    )
    switch = f"{MUON} --muon-from-adamw momentum"
    text = pretrain(2, switch, options(saved, format))
    assert "is AdamW's: Muon's momentum starts as exp_avg / (1 - β1)" in text
    assert_switched(text, unswitched)
    text = pretrain(2, switch, options(saved, format))  # a restart by the same line
    assert "is AdamW's" not in text and len(losses(text)) == 4


@pytest.mark.parametrize("format", FORMATS)
def test_muon_to_adamw_and_on_without_the_plugin(format: str, tmp_path: Path) -> None:
    saved, copy = tmp_path / "saved", tmp_path / "copy"
    unswitched = saved_and_unswitched(MUON, saved, format)
    switch = f"{ADAM} --adamw-from-muon"
    text = pretrain(2, switch, options(saved, format))
    assert "is Muon's: Adam's moments of what Muon had start at zero" in text
    assert_switched(text, unswitched)
    shutil.copytree(saved, copy)
    third = losses(pretrain(2, switch, options(saved, format)))
    alone = losses(without_plugin(2, ADAM, options(copy, format)))
    assert len(third) == len(alone) == 4 and third[0] == alone[0]


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_resumes_with_another_routing_by_way_of_adamw(
    format: str, tmp_path: Path
) -> None:
    """The two commands of docs/routing.md; before, the error that sends there."""
    saved, between, new = (tmp_path / name for name in ("saved", "between", "new_run"))
    unswitched = saved_and_unswitched(MUON, saved, format)
    routed = f"{MUON} --muon-exclude *.linear_fc1.weight"
    text = pretrain(2, routed, options(saved, format), fails=True)
    assert "linear_fc1.weight and has nothing in this run" in text and not losses(text)
    whole = "--dist-ckpt-optim-fully-reshardable" if format == "torch_dist" else ""
    carried = options(saved, format).replace(f"--save {saved}", f"--save {between}")
    carried = carried.replace("--train-iters 12", "--train-iters 4")
    keeps = "--adamw-from-muon --use-checkpoint-opt_param-scheduler"
    assert not losses(pretrain(2, ADAM, keeps, whole, carried))  # no step
    routed += " --muon-from-adamw momentum --overlap-grad-reduce"
    goes_on = options(between, format).replace(f"--save {between}", f"--save {new}")
    assert_switched(pretrain(2, routed, goes_on), unswitched)
    assert len(losses(pretrain(2, routed, options(new, format)))) == 4  # and on


@pytest.mark.parametrize("format", FORMATS)
def test_adamw_does_not_load_muons_and_with_the_plugin_names_the_flag(
    format: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    unswitched = saved_and_unswitched(MUON, saved, format)
    text = pretrain(2, ADAM, options(saved, format), fails=True)
    assert "has Muon's optimizer state: give --adamw-from-muon" in text and not losses(
        text
    )
    assert "KeyError" not in text and "CheckpointException" not in text
    text = without_plugin(2, ADAM, options(saved, format), fails=True)
    assert "exp_avg" in text and not losses(text), text[-3000:]
    text = without_plugin(2, f"{ADAM} --no-load-optim", options(saved, format))
    # the weights go on, the schedule starts anew
    assert losses(text)[0] == unswitched[0]
    assert re.findall(r"learning rate: (\S+)", text)[0] == "9.250000E-03"


TP2 = "--tensor-model-parallel-size 2"


@pytest.mark.slow
def test_megatrons_own_muon_to_muon_and_on(tmp_path: Path) -> None:
    """Its layer-wise Muon, without the plugin; then the plugin's at the same topology
    and at DP 2, where bf16 activations are summed in another order. (With DP its ranks
    gather pieces of several sizes, which gloo cannot.)
    """
    path = _path_of_megatrons_own()
    saved, copy, third = tmp_path / "saved", tmp_path / "copy", tmp_path / "third"
    # AdamW's part
    whole = "--dist-ckpt-optim-fully-reshardable" if version() >= (0, 18) else ""
    own = f"--optimizer dist_muon {TP2} {whole}"
    without_plugin(2, own, options(saved, "torch_dist"), **path)
    shutil.copytree(saved, copy)
    shutil.copytree(saved, third)
    unswitched = losses(without_plugin(2, own, options(copy, "torch_dist"), **path))
    muon = f"{MUON} --muon-momentum 0.9 {TP2}"
    text = pretrain(2, muon, options(saved, "torch_dist"))
    assert "is of Megatron's own Muon: its momentum, a mean, goes on as" in text
    assert "its other settings, if they were Megatron's defaults, are --muon-" in text
    assert "so its files are not checked" in text
    assert_switched(text, unswitched)
    text = pretrain(2, muon, options(saved, "torch_dist"))  # a restart by the same line
    assert "Megatron's own Muon: its" not in text and len(losses(text)) == 4
    dp2 = f"{MUON} --muon-momentum 0.8 --ckpt-fully-parallel-load"
    text = pretrain(2, dp2, options(third, "torch_dist"))
    assert (
        "momentum (--muon-momentum) is 0.8 now; the checkpoint was saved with 0.9"
        in text
    )
    assert losses(text)[0] == pytest.approx(unswitched[0], rel=2**-8)


@pytest.mark.slow
def test_megatrons_own_muon_loads_the_model_of_a_muon_run(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    path = _path_of_megatrons_own()
    unswitched = saved_and_unswitched(f"{MUON} {TP2}", saved, "torch_dist")
    own = f"--optimizer muon --muon-backend upstream {TP2}"
    text = pretrain(2, own, options(saved, "torch_dist"), fails=True, **path)
    assert (
        "Muon's optimizer state: --optimizer muon of Megatron's own cannot read it"
        in text
    )
    text = pretrain(2, f"{own} --no-load-optim", options(saved, "torch_dist"), **path)
    assert losses(text)[0] == unswitched[0]


def _path_of_megatrons_own() -> dict[str, str]:
    """PYTHONPATH with what Megatron's own Muon needs: see ``megatrons_muon``."""
    if version() < (0, 16):
        pytest.skip("this Megatron has no Muon of its own")
    emerging = importlib.util.find_spec("emerging_optimizers")
    if emerging is None:
        pytest.skip("emerging_optimizers is not on PYTHONPATH")
    places = [str(Path(place).parent) for place in emerging.submodule_search_locations]
    return {"PYTHONPATH": os.pathsep.join([PATHS["PYTHONPATH"], *places])}
