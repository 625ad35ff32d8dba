"""A GPU's command line in the real ``pretrain_gpt.py`` on a CPU: needs a Megatron-LM checkout.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/pretrain/test_pretrain_cpu.py
"""

from __future__ import annotations

import re

import pytest
import torch

from support.megatron_lm.scripts import (
    CHECKOUT,
    MOCK,
    MODEL,
    MUON,
    RUN,
    alone,
    done,
    known_flags,
    losses,
    needs_checkout,
    pretrain,
    words,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
CPU_ONLY = (  # of the other tests' command lines, which say themselves what a CPU needs
    "--transformer-impl local --attention-backend unfused --no-rope-fusion "
    "--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-bias-gelu-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --distributed-backend gloo"
)


def of_a_gpu(*options: str) -> list[str]:
    """The words of a plain command line: nothing in it is about a CPU."""
    text = f" {MODEL} {MOCK} {RUN} "
    for flag in re.findall(r"--\S+(?: [^-\s]\S*)?", CPU_ONLY):
        assert f" {flag} " in text, flag
        text = text.replace(f" {flag} ", " ")
    return words(text, *options)


@no_gpu
@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_a_gpus_command_line_trains(optimizer: str) -> None:
    from sys import executable

    given = f"{MUON} --distributed-backend nccl --tensor-model-parallel-size 2"
    if optimizer == "adam":
        given = "--optimizer adam --use-distributed-optimizer --weight-decay-all-params"
    processes = 2 if optimizer == "muon" else 1
    command = [executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--standalone", "-m", "megatron_muon", str(CHECKOUT / "pretrain_gpt.py")]
    text = done([*command, *of_a_gpu("--bf16 --attention-backend flash", given)])
    by_step = losses(text)
    # each step has new data: AdamW's losses in between rise, as they do without the plugin
    assert len(by_step) >= 6 and by_step[5] < by_step[0]
    for said in (
        "--distributed-backend gloo in place of nccl: NCCL connects GPUs only",
        "--transformer-impl local in place of transformer_engine: ",
        "--attention-backend unfused in place of flash: ",
        "--no-persist-layer-norm: ",
        "--no-gradient-accumulation-fusion: ",
        "--no-masked-softmax-fusion: ",
        "--no-rope-fusion: ",
    ):
        assert text.count(f"[megatron_muon] on the CPU: {said}") == 1, said
    decays = "[megatron_muon] --weight-decay-all-params: AdamW decays norms' gammas"
    assert text.count(decays) == (optimizer == "adam")
    assert text.count("is active: Distributed Muon over") == (optimizer == "muon")


def test_adamws_twin_decays_what_adamw_spares() -> None:
    given = "--bf16 --optimizer adam --use-distributed-optimizer --weight-decay 5"
    spared, decayed = (
        losses(pretrain(1, given, more)) for more in ("", "--weight-decay-all-params")
    )
    assert decayed[0] == spared[0]  # before any step
    assert all(a != b for a, b in zip(decayed[2:6], spared[2:6], strict=True))


def test_what_a_cpu_cannot_run_is_one_error() -> None:
    given = {
        "--fp8-format": "hybrid",
        "--tp-comm-overlap": "",
        "--te-rng-tracker": "",
        "--cross-entropy-fusion-impl": "te",
        "--moe-router-fusion": "",
        "--use-sharp": "",
    }
    known = {flag: value for flag, value in given.items() if flag in known_flags()}
    assert len(known) > 2
    options = " ".join(f"{flag} {value}" for flag, value in known.items())
    text = alone(MODEL, MOCK, RUN, "--bf16", MUON, options, "--muon-cpu", fails=True)
    (error,) = re.findall(r"ValueError: .*\n(?:  --.*\n)+", text)
    assert f"{len(known)} of the given options cannot" in error
    for flag in known:
        assert re.search(rf"^  {flag}\b.* \(.+\): \S", error, re.MULTILINE), flag
    assert "building GPT model" not in text


@pytest.mark.parametrize("flag", ["--qk-clip", "--muon-qk-clip 100"])
def test_a_clip_without_shards_is_refused_before_anything_is_built(flag: str) -> None:
    if flag == "--qk-clip" and f"[{flag}]" not in alone("--help"):  # a help text names it, too
        pytest.skip("this Megatron has no --qk-clip")
    adam = "--optimizer adam --muon-cpu"
    text = alone(MODEL, MOCK, RUN, "--bf16", adam, flag, fails=True)
    assert re.search(rf"{flag.split()[0]} .*--use-distributed-optimizer, or leave it out", text)
    assert "building GPT model" not in text
