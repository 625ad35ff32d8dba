"""Bad settings are refused where they are made, with the value."""

from __future__ import annotations

import inspect
import json
import runpy
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import pytest
import torch.distributed as dist

from megatron_muon import MuonConfig
from megatron_muon.lab.routes.sentences import pattern_lines
from megatron_muon.mcore.checkpoint.param_groups import (
    check_record,
    config_of,
    record,
)
from megatron_muon.orthogonalize.iteration import takes_gram
from megatron_muon.orthogonalize.numerics import Device, Numerics, layout_free
from megatron_muon.planning.describe import computing_line, not_shared_lines
from megatron_muon.planning.plan import with_settings
from megatron_muon.rules.block_steps import block_numerics, in_tp_slices
from megatron_muon.settings.coefficients import SETS, NsDtype, schedule
from megatron_muon.settings.config import ROWS
from megatron_muon.settings.patterns import settings_of, written
from megatron_muon.settings.update import Preset
from support import ROOT
from support.megatron_lm import flag_parsers
from support.sections import whole_parameter

CPUS: tuple[Device, ...] = ("cpu", "cpu_bf16")
CUDAS: tuple[Device, ...] = ("cuda", "cuda_symmetric", "cuda_triton")


def test_lists_are_taken_where_tuples_are() -> None:
    """YAML and Hydra have no tuples."""
    lists = MuonConfig(
        muon_include=["a"], lr_mults=[["b", 2.0]], ns_coefficients=[2.0, -1.5, 0.5]
    )
    assert lists == MuonConfig(
        muon_include=("a",), lr_mults=(("b", 2.0),), ns_coefficients=(2.0, -1.5, 0.5)
    )


def test_a_name_close_to_a_settings_is_answered_by_it() -> None:
    with pytest.raises(
        TypeError, match="no setting 'exclude'; did you mean 'muon_exclude'"
    ):
        MuonConfig(exclude=("a",))
    with pytest.raises(TypeError, match=r"no setting .x.$"):
        MuonConfig(x=1)


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What rank 0 prints where a run loads a record."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def load(saved: dict[str, Any], now: Numerics) -> str:
        check_record({"megatron_muon": saved}, now)
        return capsys.readouterr().out

    return load


@pytest.mark.parametrize(
    "recorded",
    [
        {"ns_coefficients": (3.4445, -4.7750, 2.0315)},  # simple's
        {"align_shards": True},  # a setting that left
        # as 0.2.0 recorded homes that were chosen by speeds; they change no bit
        {"homes": "auto", "rank_tflops": 600.0, "link_gbytes": 12.0},
    ],
    ids=str,
)
def test_a_record_in_other_words_differs_in_nothing(
    recorded: dict[str, Any], said: Callable[..., str]
) -> None:
    numerics = Numerics(MuonConfig(), "cpu")
    saved = record(numerics)
    own = config_of(saved["settings"])
    saved["settings"].update(recorded)
    assert said(saved, numerics) == ""
    if "ns_coefficients" not in recorded:
        assert config_of(saved["settings"]) == own and own.homes == "balanced"


def test_a_checkpoint_from_before_a_setting_has_its_default(
    said: Callable[..., str],
) -> None:
    numerics = Numerics(MuonConfig(), "cpu")
    saved = record(numerics)
    for name in ("round_bytes", "ns_batch"):
        del saved["settings"][name]
    assert said(saved, numerics) == ""
    rebuilt = MuonConfig(**saved["settings"])  # what is made of a record
    taken = {"ns_iteration": "standard", "ns_dtype": "bf16", "split_matrices": "off"}
    assert rebuilt == MuonConfig(**taken)


@pytest.mark.parametrize("device", get_args(Device))
@pytest.mark.parametrize(
    "name, earlier, resolved",
    [
        ("ns_iteration", "standard", "iteration"),
        ("ns_dtype", "bf16", "dtype"),
        ("split_matrices", "off", "split"),
    ],
)
def test_a_checkpoint_has_what_the_device_chose(
    name: str, earlier: str, resolved: str, device: Device, said: Callable[..., str]
) -> None:
    """One from before it was the device's choice has ``earlier``, or nothing of it,
    which was that: it loads, and a run that takes another says so.
    """
    numerics = Numerics(MuonConfig(), device)
    taken = getattr(numerics, resolved)
    saved = record(numerics)
    assert saved["settings"][name] == taken
    asked = Numerics(MuonConfig(**{name: earlier}), device)  # type: ignore[arg-type]
    before = record(asked)
    without = record(numerics)
    del without["settings"][name]
    told = f"is {taken!r} now; the checkpoint was saved with {earlier!r}"
    assert told not in said(saved, numerics)
    for one in (before, without):
        assert said(one, numerics).count(told) == (taken != earlier)
    assert said(before, asked) == ""


def test_a_resume_says_that_its_table_of_patterns_is_another(
    said: Callable[..., str],
) -> None:
    """A record of 0.2.0 has none, which is an empty one."""
    plain = Numerics(MuonConfig())
    table = Numerics(MuonConfig(by_pattern={"a": {"ns_steps": 8}}))
    of_020 = record(plain)
    del of_020["settings"]["by_pattern"]
    told = "by_pattern (--muon-for) is {} now; the checkpoint was saved with {}"
    own = "('a:ns_steps=8',)"
    for saved, now, line in (
        (of_020, plain, ""),
        (of_020, table, told.format(own, "()")),
        (record(table), plain, told.format("()", own)),
        (record(table), table, ""),
    ):
        assert said(saved, now).strip().removeprefix("[megatron_muon] ") == line


def test_settings_by_pattern_are_written_in_one_way() -> None:
    """As texts of a command line or a framework's list, as a mapping, and read again;
    of two patterns the last counts, per setting.
    """
    texts = ["*.fc?.*:ns_steps=8,lr=3e-4", "*.fc2.*:lr=1,rms=.5,scale_mode=spectral"]
    config = MuonConfig(by_pattern=texts)
    mapping = {
        "*.fc?.*": {"lr": 0.0003, "ns_steps": 8},
        "*.fc2.*": {"scale_mode": "spectral", "rms": 0.5, "lr": 1},
    }
    again = MuonConfig(by_pattern=json.loads(json.dumps(config.by_pattern)))
    assert config == MuonConfig(by_pattern=mapping) == again
    found = settings_of(config.by_pattern, ["decoder.fc2.weight"])
    assert found == {"lr": 1, "ns_steps": 8, "rms": 0.5, "scale_mode": "spectral"}
    assert config.where(written(found)) == MuonConfig(ns_steps=8, matched_adamw_rms=0.5)


def test_coefficients_by_pattern_bring_the_steps_that_they_need() -> None:
    (text,) = MuonConfig(by_pattern=["a:ns_coefficients=deepseekv4"]).by_pattern
    settings = text.removeprefix("a:")
    assert MuonConfig().where(settings).ns_steps == 10
    with pytest.raises(ValueError, match=r"has 10 steps, and ns_steps.* is 6"):
        MuonConfig(ns_steps=6, by_pattern=[text])


def test_a_patterns_steps_are_those_of_its_coefficients_in_every_copy() -> None:
    """Of block steps and torch's deterministic mode, too."""
    config = MuonConfig(ns_coefficients="deepseekv4", full_period=2)
    copies = [
        config,
        replace(config, momentum=0.9),
        block_numerics(Numerics(config)).config,
        layout_free(config, is_deterministic=True),
        replace(config, ns_steps=10),
        MuonConfig(ns_coefficients="deepseekv4", ns_steps=10),
    ]
    for copy in copies:
        assert copy.ns_steps == 10 and copy.where("rms=0.3").ns_steps == 10
        assert copy.where("ns_coefficients=simple").ns_steps == 5
        assert copy.where("ns_coefficients=simple,ns_steps=7").ns_steps == 7
    given = replace(MuonConfig(ns_steps=6), momentum=0.9)
    assert given.where("ns_coefficients=quintic").ns_steps == 6


@pytest.mark.parametrize(
    "rule, own, more, said",
    [
        ("normuon", "rule=hyperball", {}, "'rule=hyperball' is no setting by pattern"),
        ("hyperball", "rms=0.3", {}, "in radii"),
        ("normuon", "rms=0.3", {"full_period": 2}, "full_period"),
        ("normuon", "rms=0.3", {"radii": (("a", 1.0),)}, "radii .* is of rule"),
    ],
)
def test_some_settings_cannot_be_beside_a_rule(
    rule: str, own: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        MuonConfig(rule=rule, by_pattern=[f"a:{own}"], **more)


def test_block_steps_multiply_the_scale_of_a_pattern_too() -> None:
    config = MuonConfig(
        full_period=2, block_lr_mult=0.5, by_pattern=["a:rms=0.4", "b:ns_steps=8"]
    )
    block = block_numerics(Numerics(config)).config
    assert block.by_pattern == ("a:rms=0.2", "b:ns_steps=8")
    assert block.where("rms=0.2").matched_adamw_rms == 0.2


@pytest.mark.parametrize("part", ["", "[v]"])
def test_a_slice_of_a_block_step_has_the_settings_of_its_matrix(part: str) -> None:
    """Its mark is no part of a fused weight, which a pattern names in brackets."""
    full = replace(whole_parameter(f"w{part}", (8, 6), 0, tp=2), name="w")
    config = MuonConfig(by_pattern=["w[*]:rms=0.5"], full_period=2)
    made = with_settings([full, in_tp_slices(full)], config)
    own = [[matrix.own for matrix in each.matrices] for each in made]
    assert own == ([["rms=0.5"], ["rms=0.5"] * 2] if part else [[""], [""] * 2])


def test_a_resume_says_where_auto_chooses_by_other_rules_than_the_checkpoints(
    said: Callable[..., str],
) -> None:
    """0.2.0's records do not say by which; without auto nothing is chosen."""
    for split, iteration, named in (
        ("auto", "auto", "split_matrices (--muon-split-matrices) and ns_iteration"),
        ("off", "auto", "ns_iteration (--muon-ns-iteration) auto: "),
        ("off", "standard", ""),
    ):
        config = MuonConfig(split_matrices=split, ns_iteration=iteration)  # type: ignore[arg-type]
        numerics = Numerics(config, "cuda")
        saved = record(numerics)
        assert said(saved, numerics) == ""
        del saved["choices"]
        printed = said(saved, numerics)
        assert named in printed
        assert printed.count("chose by other rules") == bool(named)


def test_triton_multiplies_16_bits_alone() -> None:
    with pytest.raises(ValueError, match=r"triton multiplies bf16 and fp16, and ns_d"):
        MuonConfig(symmetric_products="triton", ns_dtype="fp32")


LOGGED = MuonConfig(log_interval=10)


@pytest.mark.parametrize("device", get_args(Device))
def test_a_gpu_shares_matrices_where_bits_may_depend_on_the_layout(
    device: Device,
) -> None:
    of_gpu = "auto" if device in CUDAS else "off"
    assert Numerics(MuonConfig(), device).split == of_gpu
    assert Numerics(LOGGED, device).split == "off"
    assert (
        Numerics(layout_free(MuonConfig(), is_deterministic=True), device).split
        == "off"
    )
    assert layout_free(MuonConfig(), is_deterministic=False) == MuonConfig()
    asked = MuonConfig(split_matrices=4)
    assert layout_free(asked, is_deterministic=True) == asked
    for config, is_deterministic, why in (
        (MuonConfig(), False, None),
        (MuonConfig(), True, "deterministic mode"),
        (LOGGED, False, "--muon-log-interval"),
        (asked, True, None),
    ):
        lines = not_shared_lines(config, device, is_deterministic=is_deterministic)
        assert len(lines) == (why is not None and device in CUDAS)
        assert all(why is not None and why in line for line in lines)


@pytest.mark.parametrize(
    "settings, named",
    [
        (
            {"ns_coefficients": ((2.0, -1.5, 0.5),)},
            r"ns-coefficients\) \(\(2.0, -1.5, 0.5\),\), ns_steps .* 5, .* 'bf16 and f",
        ),
        (
            {"ns_steps": 7},
            r"ns-coefficients\) 'simple', ns_steps .* 7, .* 'bf16 and fp16'",
        ),
        (
            {"ns_coefficients": (2.0, -1.5, 0.5)},
            r"\(\(2.0, -1.5, 0.5\),\), ns_steps .* 5",
        ),
    ],
)
def test_without_tested_restarts_gram_is_refused_and_auto_is_standard(
    settings: dict[str, Any], named: str
) -> None:
    ways_out = r"take ns_iteration .* 'auto' or 'standard', or what gram has been tested with: simp"
    with pytest.raises(ValueError, match=f"{named}.*{ways_out}"):
        MuonConfig(ns_iteration="gram", **settings)
    for device in get_args(Device):
        for iteration in (None, "auto"):
            config = MuonConfig(preset="fast", ns_iteration=iteration, **settings)
            assert Numerics(config, device).iteration == "standard"
            assert not takes_gram(4096, 16384, Numerics(config, device))
            line = computing_line(
                Numerics(config, device), "torch", "foreach", in_batches=True
            )
            said = "since the Gram iteration has not been found accurate"
            is_wanted = iteration == "auto" or device in CUDAS
            assert (said in line) == is_wanted
            of_run = MuonConfig(
                preset="fast", ns_iteration=iteration, by_pattern={"a": settings}
            )
            (line,) = pattern_lines(Numerics(of_run, device))
            assert (said in line) == is_wanted


@pytest.mark.parametrize("device", CUDAS)
@pytest.mark.parametrize("dtype", get_args(NsDtype))
def test_a_gpu_takes_auto_where_restarts_are_known(
    dtype: NsDtype, device: Device
) -> None:
    """With the preset fast and where it is asked for; on a CPU the default is
    standard.
    """
    for name, coefficients in SETS.items():
        numbers = {5, 7, *coefficients.restarts}
        for steps in {max(number, coefficients.fewest) for number in numbers}:
            lists = coefficients.restarts.get(steps)
            known = lists is not None and getattr(lists, dtype) is not None
            config = MuonConfig(
                preset="fast", ns_coefficients=name, ns_steps=steps, ns_dtype=dtype
            )
            asked = replace(config, ns_iteration="auto")
            taken = "auto" if known else "standard"
            assert (
                Numerics(config, device).iteration
                == Numerics(asked, device).iteration
                == taken
            )
            assert {Numerics(config, cpu).iteration for cpu in CPUS} == {"standard"}


@pytest.mark.parametrize("device", CUDAS)
def test_a_preset_fills_settings_that_are_not_set_on_a_gpu(device: Device) -> None:
    safe, fast = (
        Numerics(MuonConfig(preset=preset), device) for preset in get_args(Preset)
    )
    assert (safe.dtype, safe.iteration, safe.split) == ("bf16", "standard", "auto")
    assert (fast.dtype, fast.iteration, fast.split) == ("fp16", "auto", "auto")
    for cpu in CPUS:  # which has neither fp16 products nor a use for Gram by default
        own = Numerics(MuonConfig(preset="fast"), cpu)
        assert (own.dtype, own.iteration) == ("bf16", "standard")
    for whole in (safe, fast):
        alone = Numerics(replace(whole.config, ns_dtype="fp32"), device)
        assert (alone.dtype, alone.iteration) == ("fp32", whole.iteration)
        alone = Numerics(replace(whole.config, ns_iteration="gram"), device)
        assert (alone.dtype, alone.iteration) == (whole.dtype, "gram")
        line = computing_line(whole, "", "", in_batches=True)
        assert f", {whole.dtype}, iteration {whole.iteration};" in line


def test_a_run_with_another_preset_prints_the_flags_that_keep_its_bits(
    said: Callable[..., str],
) -> None:
    saved = record(Numerics(MuonConfig(preset="fast"), "cuda"))
    told = [
        "ns_dtype (--muon-ns-dtype) is 'bf16' now; the checkpoint was saved with "
        "'fp16': --muon-ns-dtype fp16 keeps its bits",
        "ns_iteration (--muon-ns-iteration) is 'standard' now; the checkpoint was "
        "saved with 'auto': --muon-ns-iteration auto keeps its bits",
    ]
    assert said(saved, Numerics(MuonConfig(), "cuda")).splitlines() == [
        f"[megatron_muon] {line}" for line in told
    ]
    kept = MuonConfig(ns_dtype="fp16", ns_iteration="auto")
    assert said(saved, Numerics(kept, "cuda")) == ""


@pytest.mark.parametrize(
    "given, said",
    [
        ({}, "simple, 5 steps, "),
        ({"ns_steps": 7}, "simple, 7 steps (made for 5), "),
        ({"ns_coefficients": "deepseekv4"}, "deepseekv4, 10 steps, "),
        ({"ns_coefficients": "polar_express"}, "polar_express, 5 steps (made for 8), "),
        ({"ns_coefficients": ((2.0, -1.5, 0.5),)}, "2.0,-1.5,0.5, 5 steps, "),
        (
            {"ns_coefficients": ((2.0, -1.5, 0.5),) * 6},
            ";2.0,-1.5,0.5, 5 steps (made for 6), ",
        ),
    ],
    ids=str,
)
def test_the_start_names_a_number_of_steps_unlike_the_sets_own(
    given: dict[str, Any], said: str
) -> None:
    numerics = Numerics(MuonConfig(**given), "cpu")
    line = computing_line(numerics, "torch", "foreach", in_batches=False)
    assert said in line


@pytest.mark.parametrize("steps", [5, 8, 9])
def test_a_resume_of_deepseekv4_cut_short_is_an_error_with_the_flags_that_keep_its_bits(
    steps: int, said: Callable[..., str]
) -> None:
    """0.2.0 took so many steps of it."""
    whole = Numerics(MuonConfig(ns_coefficients="deepseekv4"), "cpu")
    saved = record(whole)
    saved["settings"]["ns_steps"] = steps
    with pytest.raises(ValueError, match="These flags keep its bits: ") as refused:
        said(saved, whole)
    flags = shlex.split(str(refused.value).split("keep its bits: ")[1].split(". ")[0])
    keeps = flag_parsers.config_of("0.19", *flags)
    before = schedule("deepseekv4", steps)
    for device in get_args(Device):
        assert Numerics(keeps, device).steps == before
        assert Numerics(keeps, device).iteration == "standard"
    of_run = Numerics(keeps, "cpu")
    assert said(saved, of_run) == ""
    assert "saved with" in said(record(of_run), whole)
    # AdamW, which reads it, too, takes over no coefficients
    assert config_of(saved["settings"]) == MuonConfig()


def test_a_changed_copy_knows_which_settings_were_passed() -> None:
    assert MuonConfig(momentum=0.95).given == {"momentum"}
    assert replace(MuonConfig(), homes="local").given == {"homes"}
    assert replace(MuonConfig(momentum=0.9), homes="local").given == {
        "homes",
        "momentum",
    }


def test_the_signature_has_the_name_type_and_default_of_each_field() -> None:
    parameters = inspect.signature(MuonConfig).parameters
    assert list(parameters) == [field.name for field in fields(MuonConfig)]
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == ROWS[name].default
        assert not isinstance(parameter.annotation, str), "help() would not show it"
    assert parameters["momentum"].annotation is float
    assert (
        parameters["scale_mode"].annotation
        == Literal["spectral", "unit_rms_norm", "shape_scaling", "update_norm"]
    )


def test_a_subclass_has_its_own_fields_in_its_signature() -> None:
    @dataclass(frozen=True, kw_only=True)
    class WithName(MuonConfig):
        name: str = ""

    parameters = inspect.signature(WithName).parameters
    assert list(parameters) == [*inspect.signature(MuonConfig).parameters, "name"]
    assert replace(WithName(name="a"), momentum=0.9).given == {"momentum", "name"}


def test_the_docstring_has_the_sentence_of_each_field_as_help_says_it() -> None:
    sentence_of = runpy.run_path(str(ROOT / "docs" / "generate.py"))["sentence_of"]
    text = " ".join(inspect.getdoc(MuonConfig).split())
    for name, row in ROWS.items():
        sentence = sentence_of(row)
        assert len(sentence.split()) > 3
        assert f" {name}: {sentence} Default: {row.default!r}." in text
    assert "--muon" not in text, "a flag in place of its field"


@pytest.mark.parametrize(
    "field, starts",
    [
        ("full_period", "Steps from one full orthogonalization to the next, by Adam's"),
        ("nesterov", "False: orthogonalize the momentum M."),
        ("round_bytes", "Cap on a rank's buffers for one round of the exchange, in by"),
        (
            "preset",
            "Defaults of two settings. safe: ns_dtype bf16 and ns_iteration stan",
        ),
        ("wd_mults", "The same as lr_mults for the weight decay."),
        (
            "matched_adamw_rms",
            "Root mean square of a matrix's update, per unit of lr (a",
        ),
    ],
)
def test_a_sentence_is_of_the_field_where_the_flag_means_something_else(
    field: str, starts: str
) -> None:
    text = " ".join(inspect.getdoc(MuonConfig).split())
    assert f" {field}: {starts}" in text


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"momentum_start": 0.5}, "there is none: give momentum_warmup"),
        ({"momentum_warmup": 3, "momentum": 0.8}, r"0.85 is above momentum .* 0.8"),
    ],
    ids=["no warm-up", "above the end"],
)
def test_a_warm_up_of_the_momentum_rises(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^momentum_start \(.*" + said):
        MuonConfig(**settings)
