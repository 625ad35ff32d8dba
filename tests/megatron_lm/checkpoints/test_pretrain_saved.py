"""A checkpoint of a run with Muon, read by a Megatron without the plugin; needs a
checkout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.megatron_lm.scripts import (
    HERE,
    MODEL,
    MUON,
    PATHS,
    done,
    losses,
    needs_checkout,
    pretrain,
    without_plugin,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model alone, in one file."""
    folder = tmp_path_factory.mktemp("saved")
    save = f"--save {folder} --save-interval 6 --ckpt-format torch --no-save-optim"
    pretrain(
        1, MUON, "--bf16 --muon-momentum 0.9 --muon-exclude *.linear_fc1.weight", save
    )
    return folder


def read(how: str, checkpoint: Path) -> str:
    (file,) = checkpoint.glob("iter_*/mp_rank_00/model_optim_rng.pt")
    command = [sys.executable, str(HERE / "reads_checkpoint_args.py"), how, str(file)]
    return done(command, **PATHS)


def test_saved_arguments_say_muon_in_plain_values(checkpoint: Path) -> None:
    (line,) = [
        x for x in read("plain", checkpoint).splitlines() if x.startswith("SAVED")
    ]
    saved = json.loads(line.removeprefix("SAVED"))
    assert saved["optimizer"] == "Muon" and saved["megatron_muon"] is True
    assert saved["muon_momentum"] == 0.9
    assert saved["muon_exclude"] == ["*.linear_fc1.weight"]
    assert saved["muon_num_ns_steps"] == 5 and saved["muon_split_qkv"] is True
    assert "megatron_muon_defaults" not in saved


def test_the_saver_of_tools_checkpoint_takes_them(checkpoint: Path) -> None:
    assert "VALIDATED Muon" in read("saver", checkpoint)


def test_use_checkpoint_args_without_the_plugins_flags(checkpoint: Path) -> None:
    """Megatron's own training goes on from it with AdamW, and takes the model's sizes
    from it.
    """
    # Megatron fills what is not given
    model = MODEL.replace("--num-layers 4 --hidden-size 64", "")
    options = (
        f"--bf16 --load {checkpoint} --use-checkpoint-args --no-load-optim "
        "--no-load-rng"
    )
    options += " --ckpt-format torch --train-iters 8 --use-distributed-optimizer"
    text = without_plugin(1, options, model=model)
    assert "Setting num_layers to 4 from checkpoint" in text
    assert len(losses(text)) >= 2
