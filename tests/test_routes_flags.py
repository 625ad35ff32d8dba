"""Which of Megatron's flags ``megatron-muon routes`` reads, refuses and names as not read."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from installed import NAME
from megatron_lm import PATHS, needs_checkout
from model_flags import TINY

from megatron_muon.cli import main
from megatron_muon.cli.versions import RANGES, has_flag


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-layers", "two"], "argument --num-layers: invalid int value: 'two'"),
        (["--normalization", "Batch"], "argument --normalization: invalid choice: 'Batch'"),
        (["--num-experts", "4", "--moe-layer-freq", "[0,2]"], "no number and no list of 0 and 1"),
        (["--moe-layer-freq", "__import__('os')"], "no number and no list of 0 and 1"),
        (["--muon-homes", "here"], "argument --muon-homes: invalid choice: 'here'"),
        (["--muon-link-gbytes", "0"], "link_gbytes (--muon-link-gbytes) must be above 0, got 0.0"),
        (["--muon-ns-steps", "0"], "ns_steps (--muon-ns-steps) must be at least 1, got 0"),
        (["--muon-include", "no.such.*"], "'no.such.*' in --muon-include or --muon-exclude"),
        (["--muon-include", "*norm*"], "Muon updates matrices: only 2-D weights"),
        (["--world-size", "3", "--tensor-model-parallel-size", "2"], "not a multiple of TP x CP"),
        (["--tensor-model-parallel-size", "3"], "num_attention_heads (4) must be a multiple"),
        (["--num-distributed-optimizer-instances", "2"], "does not divide the 1 shards"),
        (["--no-position-embedding", "--position-embedding-type", "none"], "needs --position"),
        (["--spec", "a", "b"], "--spec is not supported"),
        (["--fp8-param-gather"], "does not support fp8_param_gather yet"),
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
from megatron_muon.cli.flags import add_megatron_flags

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
