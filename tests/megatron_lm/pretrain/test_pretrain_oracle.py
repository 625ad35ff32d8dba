"""Three steps of the real ``pretrain_gpt.py`` equal the float64 oracle's; needs a checkout."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.megatron_lm.against_oracle import oracle_of, outside, recorded, stepped
from support.megatron_lm.scripts import needs_checkout

pytestmark = [needs_checkout, pytest.mark.timeout(900)]


@cache
def run_of(folder: Path, ns_dtype: str) -> dict[str, Any]:
    return recorded(folder / f"{ns_dtype}.pt", f"--muon-ns-dtype {ns_dtype}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded")


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_three_steps_equal_the_oracles(folder: Path, ns_dtype: str) -> None:
    run = run_of(folder, ns_dtype)
    assert outside(run, ns_dtype, stepped(run, oracle_of(run))) == set()


@pytest.mark.parametrize("change", [{"nesterov": False}, {"ns_steps": 4}, {"split_qkv": False}])
def test_another_muon_is_noticed(folder: Path, change: dict[str, Any]) -> None:
    run = run_of(folder, "bf16")
    wrong = outside(run, "bf16", stepped(run, oracle_of(run, **change)))
    assert any(name.endswith("linear_qkv.weight") for name in wrong)
    assert not any("embedding" in name or "norm" in name for name in wrong)
