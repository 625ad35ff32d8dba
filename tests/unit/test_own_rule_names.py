"""Rules of one's own before a run: their names, and what is tried on them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig, OwnRule, register_rule
from megatron_muon.mcore.checkpoint.param_groups import config_of
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.describe import computing_line
from megatron_muon.rules.muon import Muon
from megatron_muon.rules.own import _WAYS_OUT, _host_reads_refused, tried
from megatron_muon.settings import rules
from megatron_muon.settings.rules import RULES, own_rule
from megatron_muon.testing import assert_as_one_process
from support import ROOT
from support.runs import own_rules
from support.runs.other_rules import Centred
from support.runs.own_rules import HERE, UNSOUND, polar_express
from support.sections import whole_parameter

CPU = torch.device("cpu")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers these rules, and no others."""
    return lambda **every: monkeypatch.setattr(rules, "_registered", every)


def _tried(name: str, **settings: Any) -> str:
    return tried(Numerics(MuonConfig(rule=name, **settings), "cpu"), (), CPU)


def test_a_registered_name_is_a_rules_once(register: Callable[..., None]) -> None:
    register()
    register_rule("polar_once", polar_express)
    assert own_rule("polar_once") == OwnRule(polar_express)
    assert MuonConfig(rule="polar_once").rule == "polar_once"
    for name in ("polar_once", "muon"):
        with pytest.raises(ValueError, match=f"there is a rule '{name}' already"):
            register_rule(name, polar_express)
    with pytest.raises(ValueError, match="letters, digits and _, got 'a:b'"):
        register_rule("a:b", polar_express)
    with pytest.raises(TypeError, match="takes a function or class, got 3"):
        register_rule("three", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes must be batch or matrix, got 'rows'"):
        OwnRule(polar_express, takes="rows")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, text",
    [
        (f"{HERE}:nothing", "AttributeError: .* no attribute 'nothing'"),
        ("no_such_module:rule", "ModuleNotFoundError: No module named 'no_such_"),
        (f"{HERE}:STEPS", "TypeError: OwnRule takes a function or class"),
        *((f"{HERE}:bad_{name}", text) for name, (_, text) in UNSOUND.items()),
    ],
)
def test_what_cannot_be_a_rule_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--muon-rule.* {name}.*{text}"):
        _tried(name)


def test_it_is_tried_on_each_shape_that_it_gets(
    register: Callable[..., None],
) -> None:
    """Of whole matrices, and of TP slices where there are block steps."""
    tried_on: list[tuple[int, ...]] = []

    def seen(x: torch.Tensor) -> torch.Tensor:
        tried_on.append(tuple(x.shape))
        return x

    register(seen=OwnRule(seen))
    every = [whole_parameter("w", (8, 6), 0, tp=2)] * 2
    for period, expected in ((1, [(2, 16, 6)]), (2, [(2, 8, 6), (2, 16, 6)])):
        tried_on.clear()
        config = MuonConfig(rule="seen", full_period=period)
        tried(Numerics(config, "cpu"), every, CPU)
        assert tried_on == [(2, 32, 48), *expected]


@pytest.mark.parametrize(
    "name, settings, text",
    [
        ("polar_express", {"ns_steps": 6}, "--muon-ns-steps"),
        ("polar", {"matched_adamw_rms": 0.3}, "--muon-matched-adamw-rms"),
        ("polar", {"full_period": 2, "block_lr_mult": 0.5}, "--muon-block-lr-mult"),
        ("polar_express", {"split_matrices": 2}, "--muon-split-matrices"),
        ("polar", {"by_pattern": ("*:rms=0.3",)}, "--muon-matched-adamw-rms"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(
    name: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _tried(f"{HERE}:{name}", **settings)


@pytest.mark.parametrize("base", [n for n, row in RULES.items() if row.settings])
def test_a_subclass_of_a_rule_with_settings_of_its_own_is_refused(
    base: str, register: Callable[..., None]
) -> None:
    """Nobody would set its radii, or keep its moments."""
    register(mine=OwnRule(type("Mine", (RULES[base].imported(),), {})))
    with pytest.raises(ValueError, match=f"mine is a subclass of .*{base}'s"):
        _tried("mine")


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"log_interval": 2}, "--muon-log-interval"),
        ({"cautious_decay": True}, "--muon-cautious-decay"),
        ({"momentum_warmup": 3}, "--muon-momentum-warmup"),
        ({"scale_mode": "update_norm"}, "--muon-scale-mode"),
        ({"by_pattern": ("*:rms=1,scale_mode=update_norm",)}, "--muon-scale-mode"),
    ],
)
def test_what_muons_class_does_is_refused_with_a_class_beside_it(
    settings: dict[str, Any], text: str, register: Callable[..., None]
) -> None:
    below = OwnRule(type("Mine", (Muon,), {}))
    register(beside=OwnRule(Centred), below=below)
    _tried("beside", scale_mode="shape_scaling")
    _tried("below", **settings)
    with pytest.raises(ValueError, match=f"{text}.* beside is none: leave"):
        _tried("beside", **settings)


def test_ranks_compare_a_direction_of_a_matrix(register: Callable[..., None]) -> None:
    every = {
        "mine": OwnRule(polar_express),
        "sign": OwnRule(torch.sign),
        "scaled": OwnRule(polar_express, scale=lambda rows, cols: 2.0),
    }
    register(**every)
    lines = {_tried(name).replace(name, "NAME") for name in every}
    assert len(lines) == len(every)
    assert _tried("mine") == _tried("mine")


def test_a_module_that_ends_the_process_at_import_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_process.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="cannot be imported: SystemExit: 0"):
        own_rule("ends_the_process:rule")


def test_gradients_within_enable_grad_are_a_rule(
    register: Callable[..., None],
) -> None:
    """The way out that the error names."""
    register(mine=OwnRule(torch.enable_grad()(own_rules.by_autograd)))
    assert _tried("mine")


@pytest.mark.parametrize("reads_host", [False, True])
def test_on_a_gpu_a_read_by_the_host_is_declared(
    reads_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    rule = OwnRule(own_rules.rms_of_host, "matrix", reads_host=reads_host)
    error = RuntimeError("called a synchronizing CUDA operation")
    with pytest.raises(RuntimeError, match="CUDA operation"):
        with _host_reads_refused(rule, torch.device("cuda")):
            raise error
    assert modes == ([0] if reads_host else [0, "error", 0])
    assert "reads_host=True" in _WAYS_OUT["synchroniz"]


def test_a_name_from_a_checkpoint_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves_a_trace.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for rule in ("leaves_a_trace:rule", "registered_then"):
        assert config_of({"rule": rule}).rule == "muon"
    assert "leaves_a_trace" not in sys.modules


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "polar_express",
            "polar_express: a function, in fp32; ranks share no matrix; mom",
        ),
        ("polar", "in fp32; .*; the host waits for the device at each matrix; "),
    ],
)
def test_the_start_says_what_takes_newton_schulzs_place(name: str, text: str) -> None:
    numerics = Numerics(MuonConfig(rule=f"{HERE}:{name}"), "cuda")
    assert numerics.split == "off"
    line = computing_line(numerics, "torch", "foreach", in_batches=True)
    assert re.search(text, line) and "Newton-Schulz" not in line


def test_the_pages_rule_passes_the_pages_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    rule, test = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert rule.count("\n") <= 40
    (tmp_path / "my_rule.py").write_text(rule)
    monkeypatch.syspath_prepend(tmp_path)
    found: dict[str, Any] = {}
    exec(test, found)
    found["test_my_rule"]()
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    direction = sys.modules["my_rule"].rule.direction
    for found_one, one in zip(direction(x), x, strict=True):
        torch.testing.assert_close(found_one, own_rules.polar_grad(one))


def test_the_helper_that_ships_finds_what_the_layout_would_decide() -> None:
    assert_as_one_process(f"{HERE}:one_by_one", steps=1)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_as_one_process(f"{HERE}:mixes", steps=1)
