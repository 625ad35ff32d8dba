"""Bad settings are refused where they are made, with the value."""

from __future__ import annotations

import math

import pytest

from megatron_muon import MuonConfig
from megatron_muon.coefficients import schedule


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("matched_adamw_rms", -0.2, ValueError, "matched_adamw_rms must be above 0, got -0.2"),
        ("matched_adamw_rms", 0, ValueError, "matched_adamw_rms must be above 0, got 0"),
        ("matched_adamw_rms", math.nan, ValueError, "matched_adamw_rms must be finite, got nan"),
        ("matched_adamw_rms", "0.2", TypeError, "matched_adamw_rms must be a number, got '0.2'"),
        ("momentum", -0.1, ValueError, r"momentum must be in \[0, 1\), got -0.1"),
        ("momentum", 1.0, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
        ("momentum", math.inf, ValueError, "momentum must be finite, got inf"),
        ("momentum", True, TypeError, "momentum must be a number, got True"),
        ("nesterov", 1, TypeError, "nesterov must be True or False, got 1"),
        ("ns_steps", 0, ValueError, "ns_steps must be at least 1, got 0"),
        ("ns_steps", 10**9, ValueError, "ns_steps must be at most 100, got 1000000000"),
        ("ns_steps", 2.5, TypeError, "ns_steps must be an int, got 2.5"),
        ("ns_coefficients", (1.0, 2.0), TypeError, "must be a tuple of three numbers"),
        ("ns_coefficients", "septic", ValueError, "must be one of simple, quintic, .*got 'septic'"),
        ("ns_coefficients", [1.0, 2.0, 3.0], TypeError, "a set's name, a tuple of three numbers"),
        ("ns_coefficients", ((1.0, 2.0, 3.0), (1.0,)), TypeError, "must be a tuple of three"),
        ("ns_coefficients", (), TypeError, r"three numbers, got \(\)"),
        ("ns_iteration", "cubic", ValueError, "must be one of standard, gram, auto, got 'cubic'"),
        ("ns_coefficients", (1.0, 2.0, math.inf), ValueError, "ns_coefficients must be finite"),
        ("ns_dtype", "fp64", ValueError, "one of bf16, fp16, fp32, got 'fp64'"),
        ("homes", "anywhere", ValueError, "homes must be one of balanced, local, got 'anywhere'"),
        ("rank_tflops", 0, ValueError, "rank_tflops must be above 0, got 0"),
        ("rank_tflops", True, TypeError, "rank_tflops must be a number, got True"),
        ("rank_tflops", "fast", TypeError, "rank_tflops must be a number, got 'fast'"),
        ("link_gbytes", -1.5, ValueError, "link_gbytes must be above 0, got -1.5"),
        ("link_gbytes", math.nan, ValueError, "link_gbytes must be finite, got nan"),
        ("link_gbytes", math.inf, ValueError, "link_gbytes must be finite, got inf"),
        (
            "scale_mode",
            "max",
            ValueError,
            "scale_mode must be one of spectral, unit_rms_norm, shape",
        ),
        ("split_qkv", None, TypeError, "split_qkv must be True or False, got None"),
        ("weight_decay_all_params", "no", TypeError, "weight_decay_all_params must be True or"),
        (
            "checkpoint_digest",
            "yes",
            TypeError,
            "checkpoint_digest must be True or False, got 'yes",
        ),
    ],
)
def test_a_bad_setting_is_refused(
    setting: str, value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MuonConfig(**{setting: value})


def test_the_defaults_are_moonlights() -> None:
    config = MuonConfig()
    assert (config.matched_adamw_rms, config.momentum, config.ns_steps) == (0.2, 0.95, 5)
    assert config.ns_coefficients == "simple"
    assert schedule("simple", 5, "bf16") == ((3.4445, -4.7750, 2.0315),) * 5
    assert (config.ns_iteration, config.ns_dtype) == ("standard", "bf16")
    assert config.nesterov and config.split_qkv and not config.weight_decay_all_params


def test_simples_numbers_are_the_set_by_name() -> None:
    """Settings saved before sets had names have the numbers."""
    assert MuonConfig(ns_coefficients=(3.4445, -4.7750, 2.0315)) == MuonConfig()


def test_a_checkpoint_with_simples_numbers_differs_in_nothing() -> None:
    """A setting that differs is printed by rank 0, and asking for the rank fails here."""
    from megatron_muon.mcore.checkpoint_groups import check_record, record

    saved = record(MuonConfig())
    saved["settings"]["ns_coefficients"] = (3.4445, -4.7750, 2.0315)
    check_record({"megatron_muon": saved}, MuonConfig())


def test_a_checkpoint_from_before_a_setting_has_its_default() -> None:
    from megatron_muon.mcore.checkpoint_groups import check_record, record

    saved = record(MuonConfig())
    for name in ("rank_tflops", "link_gbytes", "round_bytes", "ns_batch"):
        del saved["settings"][name]
    check_record({"megatron_muon": saved}, MuonConfig())  # nothing differs: see above
    assert MuonConfig(**saved["settings"]) == MuonConfig()  # what is rebuilt from a record


def test_another_speed_is_told_when_a_checkpoint_is_loaded_and_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_muon.mcore import checkpoint_groups

    monkeypatch.setattr(checkpoint_groups.dist, "get_rank", lambda: 0)
    saved = {"megatron_muon": checkpoint_groups.record(MuonConfig(rank_tflops=300.0))}
    checkpoint_groups.check_record(saved, MuonConfig())
    told = "rank_tflops is 400.0 now; the checkpoint was saved with 300.0"
    assert capsys.readouterr().out == f"[megatron_muon] {told}\n"


@pytest.mark.parametrize("iteration", ["gram", "auto"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ns_coefficients": "cans"}, "ns_coefficients='cans', ns_steps=5 in bf16"),
        ({"ns_steps": 7}, "ns_coefficients='simple', ns_steps=7 in bf16"),
        ({"ns_coefficients": (2.0, -1.5, 0.5)}, r"\(\(2.0, -1.5, 0.5\),\), ns_steps=5"),
    ],
)
def test_gram_without_tested_restarts_is_refused(
    iteration: str, settings: dict[str, object], named: str
) -> None:
    ways_out = "take ns_iteration='standard', or what it has been tested with: simple with "
    with pytest.raises(ValueError, match=f"{named}.*{ways_out}"):
        MuonConfig(ns_iteration=iteration, **settings)
    MuonConfig(**settings)


def test_cubic5_is_for_five_steps() -> None:
    with pytest.raises(ValueError, match="are for 5 steps, and ns_steps is 6: take ns_steps=5, or"):
        MuonConfig(ns_coefficients="cubic5", ns_steps=6)
