"""Which of Megatron's flags ``megatron-muon routes`` reads, refuses and names as not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_muon.cli import main
from megatron_muon.dry_run.versions import RANGES, has_flag
from megatron_muon.megatron_lm.launch import version_of
from support import ROOT
from support.installed import NAME, VERSION
from support.megatron_lm.scripts import CHECKOUT, PATHS, needs_checkout
from support.models.model_flags import TINY


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "two"], "argument --num-layers: must be a whole number of at least 1"),
        (["--normalization", "Batch"], "argument --normalization: invalid choice: 'Batch'"),
        (["--num-experts", "4", "--moe-layer-freq", "[0,2]"], "no number and no list of 0 and 1"),
        (["--moe-layer-freq", "__import__('os')"], "no number and no list of 0 and 1"),
        (["--muon-homes", "here"], "argument --muon-homes: invalid choice: 'here'"),
        (["--muon-link-gbytes", "0"], "link_gbytes (--muon-link-gbytes) must be from 1e-09 to"),
        (["--muon-ns-steps", "0"], "ns_steps (--muon-ns-steps) must be at least 1, got 0"),
        (
            ["--muon-include", "no.such.*"],
            "'no.such.*' in muon_include (--muon-include) matches no",
        ),
        (["--muon-split", "*linear_proj*=heads"], "linear_proj.weight, which can only be whole"),
        (["--muon-include", "*norm*"], "Muon updates matrices: only 2-D weights"),
        (["--world-size", "3", "--tensor-model-parallel-size", "2"], "not a multiple of TP x CP"),
        (["--tensor-model-parallel-size", "3"], "num_attention_heads (4) must be a multiple"),
        (["--num-distributed-optimizer-instances", "2"], "does not divide the 1 shards"),
        (["--no-position-embedding", "--position-embedding-type", "none"], "needs --position"),
        (["--spec", "a", "b"], "--spec a b is not supported: the layers that are built here are"),
        (["--fp8-param-gather"], "--fp8-param-gather is not supported here"),
        (["--optimizer-cpu-offload"], "does not support optimizer_cpu_offload yet"),
        (["--num-layers", "2", "17"], "unrecognized arguments: 17"),
    ],
)
def test_bad_values_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["routes", *TINY, *argv])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert message in said.err


def test_more_tp_ranks_than_query_groups_are_routed_where_megatron_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """4 KV heads at TP 8, as Qwen3-30B-A3B's; each rank has (8 + 2·4)·8 / 8 rows."""
    sizes = "--num-attention-heads 8 --kv-channels 8 --group-query-attention --num-query-groups 4"
    argv = ["routes", *TINY, *sizes.split(), "--tensor-model-parallel-size", "8", "--json"]
    if VERSION < (0, 16):
        with pytest.raises(SystemExit):
            main(argv)
        said = capsys.readouterr().err
        assert "--num-query-groups (4) must be a multiple of --tensor-model-parallel-size" in said
        assert "core 0.16 and later" in said
        return
    assert main(argv) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    (weight,) = [each for each in stage["parameters"] if each["name"] == name]
    assert weight["shape"] == [16, 64]
    assert [(m["rows"], m["cols"]) for m in weight["matrices"]] == [(64, 64), (32, 64), (32, 64)]


def test_query_groups_that_tp_cannot_cut_are_named_by_their_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "--num-attention-heads 6 --kv-channels 8 --group-query-attention --num-query-groups 3"
    with pytest.raises(SystemExit):
        main(["routes", *TINY, *sizes.split(), "--tensor-model-parallel-size", "2"])
    assert "--num-query-groups (3) must be a multiple" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [flag for flag in RANGES if not has_flag(flag)])
def test_a_flag_of_other_versions_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["routes", *TINY, flag])
    assert ended.value.code == 2
    assert f"megatron-core {NAME} has no {flag}: versions " in capsys.readouterr().err


BOTH_PARSERS = """
import argparse, json, megatron_muon
megatron_muon.cpu.enable()
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from megatron_muon.dry_run.flags import add_megatron_flags

ours, theirs = (argparse.ArgumentParser(allow_abbrev=False) for _ in range(2))
add_megatron_flags(ours, TransformerConfig)
add_megatron_arguments(theirs)
print(json.dumps([
    {name: [type(action).__name__, str(action.default), sorted(map(str, action.choices or ()))]
     for name, action in parser._option_string_actions.items()} for parser in (ours, theirs)
]))
"""
# Fields of TransformerConfig that have no flag, and what they would be.
NO_FLAGS = {
    *("--activation-func-fp8-input-store", "--moe-router-topk-limited-devices"),
    *("--disable-attention-softmax-in-fp32", "--no-attention-softmax-in-fp32"),
    *("--disable-parameter-transpose-cache", "--moe-apply-probs-on-input"),
}
DIFFER = {
    *("--num-layers", "--hidden-size", "--num-attention-heads"),  # 0 for None: both are "not given"
    "--tokenizer-type",  # any
    "--no-position-embedding",  # under its own name
    # of no consequence for parameters, so any value is taken
    *("--mtp-loss-scaling-factor", "--moe-router-score-function", "--moe-router-dtype"),
}


@needs_checkout
def test_flags_are_those_of_megatron_lm() -> None:
    env = {**os.environ, **PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BOTH_PARSERS]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ours, theirs = json.loads(result.stdout.splitlines()[-1])
    read = {name for name, (kind, *_) in ours.items() if kind not in ("_Refuse", "_Lack")}
    assert len(read) > 80 and read - theirs.keys() <= NO_FLAGS
    assert {name: ours[name] for name in sorted(read & theirs.keys() - DIFFER)} == {
        name: theirs[name] for name in sorted(read & theirs.keys() - DIFFER)
    }
    lacked = {name for name, (kind, *_) in ours.items() if kind == "_Lack"}
    assert lacked and not lacked & theirs.keys()


def test_a_vocabulary_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    without = [word for word in TINY if word not in ("--vocab-size", "100")]
    with pytest.raises(SystemExit):
        main(["routes", *without, "--tokenizer-type", "GPT2BPETokenizer"])
    assert "give --padded-vocab-size, or --vocab-size" in capsys.readouterr().err


def test_flags_that_are_not_read_are_listed_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TINY[:2], "--lr", "1e-3", "--adam-betas", "-1", "2", "--log-throughput"]
    argv += ["--swigul", "--train-iters=7", "--recompute-num-layers", "1", *TINY[2:]]
    assert main(["routes", *argv]) == 0
    assert capsys.readouterr().err.strip().split("\n") == [
        "megatron-muon routes: not read: --lr 1e-3, --adam-betas -1 2, --log-throughput, "
        "--swigul (did you mean --swiglu?), --train-iters=7, --recompute-num-layers 1"
    ]


def test_what_differs_from_transformer_engine_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [word for word in TINY if word not in ("--transformer-impl", "local")]
    argv += ["--num-experts", "4", "--moe-grouped-gemm", "--disable-bias-linear"]
    assert main(["routes", *argv]) == 0
    said = capsys.readouterr()
    assert "built from Megatron's local modules, not --transformer-impl transformer_engine" in (
        said.err
    )
    assert "experts.linear_fc1.weight7 as experts.local_experts.7.linear_fc1.weight" in said.err
    assert ".experts.local_experts.{0..3}.linear_fc1.weight" in said.out


# --- a checkout, and what no flag is ----------------------------------------------------------


def test_the_core_that_the_model_is_built_with_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import megatron.core

    folder = str(Path(megatron.core.__path__[0]).resolve())
    assert main(["routes", *TINY]) == 0
    assert capsys.readouterr().out.startswith(f"megatron-core {NAME} ({folder})\n\npipeline stage")
    assert main(["routes", "--json", *TINY]) == 0
    printed = json.loads(capsys.readouterr().out)["megatron_core"]
    assert printed == {"version": NAME, "folder": folder}


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["routes", str(tmp_path), *TINY])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and str(tmp_path) in said.err
    assert said.err.startswith("megatron-muon routes: error: ")


@needs_checkout
def test_a_checkout_is_taken_as_doctor_takes_it() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'python311'}"}
    command = [sys.executable, "-c", f"import typing_override; {MAIN}"]
    arguments = ["routes", str(CHECKOUT), *TINY]
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    version = version_of(CHECKOUT / "megatron" / "core")
    assert done.stdout.startswith(f"megatron-core {version}")
    assert f"({CHECKOUT.resolve() / 'megatron' / 'core'})" in done.stdout.split("\n")[0]


MAIN = "import sys; from megatron_muon.cli import main; sys.exit(main(sys.argv[1:]))"
UNREAD = """
import argparse, json, megatron_muon
megatron_muon.cpu.enable()
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import add_megatron_arguments
from megatron_muon.dry_run.not_built import why_another_model
from megatron_muon.cli.routes import _parser

theirs = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(theirs)
known = set(_parser(TransformerConfig)._option_string_actions)
unread = [
    action.option_strings[0]
    for action in theirs._actions
    if not known & set(action.option_strings) and not why_another_model(action.option_strings[0])
]
print(json.dumps(unread))
"""


@needs_checkout
def test_every_flag_that_is_not_read_is_known_to_change_no_parameter() -> None:
    """A flag that Megatron gets must be read, refused, or looked at and added to the list."""
    env = {**os.environ, **PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import typing_override\n{UNREAD}"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    unread = set(json.loads(result.stdout.splitlines()[-1]))
    reviewed = (ROOT / "tests" / "flags_of_a_run.txt").read_text().split("\n")
    known = {line for line in reviewed if line.startswith("--")}
    assert len(unread) > 200
    assert sorted(unread - known) == []
