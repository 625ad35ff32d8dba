"""The scale of an update: by the whole matrix, in the table of ``megatron-muon scales``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.lab.commands import main
from megatron_muon.lab.scales import update_rms
from megatron_muon.runtime.update import update_scale


@pytest.mark.parametrize(
    ("mode", "square", "tall", "wide"),
    [("spectral", 8.0, 16.0, 16.0), ("unit_rms_norm", 1.0, 2.0, 0.5), ("shape_scaling", 1, 2, 1)],
)
def test_a_scale_goes_by_the_whole_matrix(
    mode: Any, square: float, tall: float, wide: float
) -> None:
    """Emerging-Optimizers' get_muon_scale_factor(size_out, size_in), by hand."""
    config = MuonConfig(scale_mode=mode, matched_adamw_rms=0.5)
    scales = [update_scale(*shape, config) for shape in ((64, 64), (256, 64), (64, 256))]
    assert scales == [0.5 * square, 0.5 * tall, 0.5 * wide]


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)], ids=str)
def test_the_table_has_the_rms_of_an_update(mode: Any, shape: tuple[int, int]) -> None:
    """Of an orthogonal direction, in float64; QR's rounding is far below 1e-12."""
    config = MuonConfig(scale_mode=mode)
    rows, cols = shape
    generator = torch.Generator().manual_seed(0)
    tall = torch.randn(max(shape), min(shape), generator=generator, dtype=torch.float64)
    direction = torch.linalg.qr(tall).Q
    update = update_scale(rows, cols, config) * (direction if rows >= cols else direction.T)
    assert float(update.square().mean().sqrt()) == pytest.approx(
        update_rms(rows, cols, config), rel=1e-12
    )


def test_scales_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scales", "--hidden-size", "64", "--factor", "0.2", "1"]) == 0
    assert "| `unit_rms_norm` | 1 | 0.125 | 0.125 | 0.0312 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["scales", "--factor", "-1"])
    assert "argument --factor: must be a finite number above 0" in capsys.readouterr().err


LEGACY_EXPERTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 100 --bf16 "
    "--num-experts 2 --moe-grouped-gemm --disable-bias-linear --transformer-impl local "
    "--position-embedding-type rope --use-distributed-optimizer"
).split()


def test_transposed_experts_have_one_scale_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", *LEGACY_EXPERTS]) == 0
    with pytest.raises(SystemExit):
        main(["routes", *LEGACY_EXPERTS, "--muon-scale-mode", "shape_scaling"])
    said = capsys.readouterr().err
    assert (
        "experts.weight1: scale_mode (--muon-scale-mode) 'shape_scaling'" in said
        and "use 'spectral'" in said
    )
