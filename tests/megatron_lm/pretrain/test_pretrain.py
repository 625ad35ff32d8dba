"""The real ``pretrain_gpt.py`` through the launcher, on CPU: needs a Megatron-LM
checkout.

MEGATRON_LM_PATH=... pytest tests/megatron_lm/pretrain/test_pretrain.py, with
tests/requirements-pretrain.txt installed.
`bash tests/versions.sh CHECKOUT ...` runs this file over several and prints a table.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import PYTHON311, ROOT, written
from support.megatron_lm.scripts import (
    CHECKOUT,
    EXPERTS,
    HERE,
    MOCK,
    MODEL,
    MUON,
    PATHS,
    RUN,
    alone,
    argument,
    done,
    falling,
    losses,
    needs_checkout,
    pretrain,
    steps,
    version,
    without_plugin,
    words,
)
from support.started import lines_at_start

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ADAM = "--bf16 --optimizer adam --use-distributed-optimizer"
ADAM_IN_FP32 = "--muon-cpu --optimizer adam --use-distributed-optimizer"
TP2_PP2 = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--sequence-parallel"
)
# Megatron's schedule asks for gathers, too (--align-param-gather)
INTERLEAVED = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)


@pytest.mark.parametrize(
    "processes, layout",
    [
        (2, "--tensor-model-parallel-size 2"),
        (8, f"{TP2_PP2} {OVERLAP}"),
        (4, f"{INTERLEAVED} {OVERLAP}"),
        (2, EXPERTS),
    ],
    ids="tp2 tp2-pp2-dp2 pp2-vpp2-dp2 ep2".split(),
)
def test_muon_trains(processes: int, layout: str) -> None:
    text = pretrain(processes, MUON, "--bf16", layout, PYTHONIOENCODING="ascii")
    falling(text)
    assert "is active: Distributed Muon" in text
    assert "[megatron_muon] no GPU is here" in text
    assert len(lines_at_start(text)) <= 7  # six, and that no GPU is here
    assert argument(text, "optimizer") == "muon"
    assert argument(text, "use_distributed_optimizer") == "True"
    assert argument(text, "muon_momentum") == "0.95"


def first_gradients(folder: Path, processes: int, *options: str) -> dict[str, Tensor]:
    """Those of one step, whole, by the names of one process."""
    folder.mkdir()
    pretrain(
        processes,
        *options,
        "--untie-embeddings-and-output-weights --train-iters 1 --eval-iters 0",
        script=HERE / "gradients_pretrain.py",
        **{**PATHS, "RECORD": str(folder)},
    )
    whole: dict[str, Tensor] = {}
    for file in sorted(folder.iterdir()):  # in the order of tensor-parallel ranks
        for name, (part, dim) in torch.load(file).items():
            if name not in whole:
                whole[name] = part
            elif dim is not None:
                whole[name] = torch.cat([whole[name], part], dim)
    return whole


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return first_gradients(tmp_path_factory.mktemp("one") / "gradients", 1, MUON)


@pytest.mark.parametrize(
    "optimizer, parallel",
    [(MUON, ""), (ADAM_IN_FP32, "--tensor-model-parallel-size 2")],
    ids=["muon-pp2-vpp2-dp2", "adam-tp2-pp2-vpp2"],
)
def test_gradients_of_interleaved_stages_are_those_of_one_process(
    optimizer: str, parallel: str, of_one_process: dict[str, Tensor], tmp_path: Path
) -> None:
    """In fp32, but for rounding. Megatron-LM asks for outputs to be freed while they
    are sent.
    """
    ours = first_gradients(tmp_path / "gradients", 4, optimizer, INTERLEAVED, parallel)
    assert ours.keys() == of_one_process.keys()
    for name, grad in of_one_process.items():
        assert (ours[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_muon_trains_with_other_matrices_rates_and_clip() -> None:
    flags = (
        "--muon-split *.linear_qkv.*=heads --muon-split-matrices 2 --muon-clip-scope "
        "adamw --muon-lr-mult *.linear_fc1.*=0.5 --muon-wd-mult embedding.*=0"
    )
    text = pretrain(2, MUON, "--bf16", flags)
    falling(text)
    assert argument(text, "muon_split_matrices") == "2"
    assert argument(text, "muon_clip_scope") == "adamw"


@pytest.mark.slow
def test_muon_trains_where_tp_cuts_query_groups() -> None:
    """2 groups on 4 ranks: a loss like that of whole groups on 2 ranks."""
    if version() < (0, 16):
        pytest.skip("Megatron itself refuses more TP ranks than query groups")
    cut, whole = (
        falling(pretrain(tp, MUON, "--bf16", f"--tensor-model-parallel-size {tp}"))
        for tp in (4, 2)
    )
    assert cut == pytest.approx(whole, rel=0.02)


def test_adam_through_the_launcher_is_megatrons() -> None:
    text = pretrain(1, ADAM)
    assert losses(text)[5] < losses(text)[0]
    without = without_plugin(1, ADAM)
    assert steps(text) == steps(without) and len(steps(text)) == 6
    assert "is active: Distributed Muon" not in text
    assert argument(text, "optimizer") == "adam"
    assert "megatron_muon ." not in text and "weight_decay_all_params" not in text


# --- a tokenised file -----------------------------------------------------------------

TEXT = (
    "the matrix is orthogonal and its momentum is small or the gradient is large"
).split()


def tokenised(folder: Path) -> str:
    """Options for a corpus that Megatron's own tool has tokenised with a tokenizer made
    here.
    """
    import sentencepiece

    generator = random.Random(0)
    lines = [" ".join(generator.choices(TEXT, k=40)) for _ in range(400)]
    (folder / "corpus.txt").write_text("\n".join(lines))
    (folder / "corpus.jsonl").write_text(
        "\n".join(json.dumps({"text": line}) for line in lines)
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "small"),
        model_type="bpe",
        vocab_size=32,
    )
    tokenizer = (
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model "
        f"{folder}/small.model"
    )
    tool = str(CHECKOUT / "tools" / "preprocess_data.py")
    files = f"--input {folder}/corpus.jsonl --output-prefix {folder}/corpus"
    # the tool appends its checkout to the path, behind an installed megatron-core
    path = os.pathsep.join(map(str, (CHECKOUT, PYTHON311)))
    options = words(files, tokenizer, "--append-eod --workers 1")
    done([sys.executable, tool, *options], PYTHONPATH=path)
    return (
        f"--data-path {folder}/corpus_text_document --make-vocab-size-divisible-by 16 "
        f"{tokenizer}"
    )


def test_muon_trains_on_a_tokenised_file(tmp_path: Path) -> None:
    text = pretrain(1, MUON, "--bf16", data=tokenised(tmp_path))
    by_step = losses(text)
    assert "is active: Distributed Muon" in text
    assert by_step[5] < 0.9 * by_step[0]


# --- flags ----------------------------------------------------------------------------

SHARDS = "--use-distributed-optimizer, or leave it out"  # of a clip


@pytest.mark.parametrize(
    "options, message",
    [
        (
            "--optimizer muon",
            "add --use-distributed-optimizer, or choose Megatron's own Muon",
        ),
        (
            "--optimizer dist_muon",
            "--optimizer dist_muon is a name of Megatron's own Muon: give --optimizer",
        ),
        (
            f"{MUON} --muon-momentum 2",
            r"momentum \(--muon-momentum\) must be in \[0, 1\), got 2.0",
        ),
        ("--optimizer adam --muon-homes local", "--muon-homes is for megatron_muon's"),
        (
            f"{MUON} --use-precision-aware-optimizer",
            r"\(it is Transformer Engine's, which is CUDA",
        ),
        ("--optimizer adam --muon-cpu --qk-clip", f"--qk-clip .*{SHARDS}"),
        (
            "--optimizer adam --muon-cpu --muon-qk-clip 100",
            f"--muon-qk-clip .*{SHARDS}",
        ),
    ],
)
def test_wrong_flags_are_errors_before_anything_is_built(
    options: str, message: str
) -> None:
    # a help text names it, too
    if "--qk-clip" in options and "[--qk-clip]" not in alone("--help"):
        pytest.skip("this Megatron has no --qk-clip")
    text = alone(MODEL, MOCK, RUN, "--bf16", options, fails=True)
    assert re.search(message, text), text[-3000:]
    assert "building GPT model" not in text


def test_a_yaml_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "optimizer: adam\nenable_msc: true\ndisable_msc_deprecated: false\n"
    )
    message = (
        "--optimizer muon, --muon-momentum with --yaml-cfg: Megatron takes "
        "every argument"
    )
    assert message in alone(MUON, f"--muon-momentum 0.9 --yaml-cfg {file}", fails=True)
    if version() >= (0, 19):
        return  # Megatron's reader of such files fails there without the plugin, too
    file.write_text(file.read_text().replace("adam", "muon"))
    assert "optimizer: muon with --yaml-cfg" in alone(f"--yaml-cfg {file}", fails=True)


@pytest.mark.parametrize(
    "script",
    "pretrain_gpt.py pretrain_mamba.py pretrain_hybrid.py pretrain_vlm.py".split(),
)
def test_a_script_is_imported_and_its_help_has_the_flags(script: str) -> None:
    if not (CHECKOUT / script).is_file():
        pytest.skip(f"this Megatron-LM has no {script}")
    try:
        text = alone("--help", script=script)
    except AssertionError as error:
        if "No module named 'transformer_engine'" not in str(error):
            raise
        pytest.skip(f"{script} of this Megatron-LM imports transformer_engine")
    assert "--muon-matched-adamw-rms" in text and "--muon-homes" in text


# --- mixed installations --------------------------------------------------------------


def test_a_core_from_elsewhere_is_refused_with_both_versions(tmp_path: Path) -> None:
    """A folder with megatron/training alone, beside another megatron.core on the
    path.
    """
    core = tmp_path / "other" / "megatron" / "core"
    number = "MAJOR = 0\nMINOR = 5\nPATCH = 7\n"
    written(core, {"__init__.py": "", "package_info.py": number})
    script = "raise SystemExit('it was run')"
    written(
        tmp_path / "fork", {"pretrain_gpt.py": script, "megatron/training/none": ""}
    )
    own = str(tmp_path / "fork" / "pretrain_gpt.py")
    path = f"{ROOT}:{tmp_path / 'other'}"
    command = [sys.executable, "-m", "megatron_muon", own]
    text = done(command, fails=True, PYTHONPATH=path)
    assert "MixedInstallationError" in text and f"{core} (core 0.5.7)" in text
