"""Megatron's errors of a load that name no way out, or a wrong one."""

from __future__ import annotations

import pytest

from megatron_muon.mcore.seams import rows
from megatron_muon.megatron_lm import checkpointing

SIZES = "(TP, PP) mismatch after resume ((1, 1) vs (2, 1) from checkpoint)"
FORMAT = "not supported for DistributedOptimizer with sharding type dp_reshardable."
FLAGS = {
    (0, 12): "without --no-ckpt-fully-parallel-save",
    (0, 14): "without --no-ckpt-fully-parallel-save",
    (0, 15): "with --dist-ckpt-optim-fully-reshardable",
    (0, 20): "with --dist-ckpt-optim-fully-reshardable",
}


@pytest.mark.parametrize("version", FLAGS)
def test_other_sizes_at_a_load_name_the_flag_of_this_megatron_alone(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise RuntimeError(
            f"{SIZES}: {FORMAT} Please use `--ckpt-fully-parallel-save` flag during "
            "checkpoint saving."
        )

    monkeypatch.setattr(rows, "megatron_version", lambda: ("", version))
    with pytest.raises(ValueError) as caught:
        checkpointing._load(load)
    said = str(caught.value)
    assert said.startswith(f"{SIZES}: this checkpoint's optimizer state loads at the")
    assert f"save once {FLAGS[version]};" in said and "Please" not in said
    assert caught.value.__context__ is None


def test_another_error_of_a_load_stays_as_it_is() -> None:
    def load() -> None:
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match=r"^no space left$"):
        checkpointing._load(load)
