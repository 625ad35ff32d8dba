"""``routes`` and ``plan`` by a run's own script: what they show is what the run builds.

Needs a Megatron-LM checkout, as ``test_pretrain.py`` does, and no GPU, no launcher, no
kernels.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from figures.published_shapes import SHAPES, planned, share
from megatron_muon.lab.dry_run.presets import PRESETS
from support.megatron_lm.scripts import (
    CHECKOUT,
    EXPERTS,
    MOCK,
    MODEL,
    MUON,
    RUN,
    done,
    needs_checkout,
    pretrain,
    version,
    words,
)

pytestmark = [needs_checkout, pytest.mark.timeout(900)]
GPT = str(CHECKOUT / "pretrain_gpt.py")
SIZES = (
    "--hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --bf16 --normalization RMSNorm "
    "--disable-bias-linear --swiglu --untie-embeddings-and-output-weights "
)
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def muon(*line: str, fails: bool = False) -> str:
    return done([sys.executable, "-m", "megatron_muon", *line], fails)


def routes(script: str, *options: str, world: int = 2) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "routes.json")
        line = "routes", "--json", str(file), "--world-size", str(world), script
        muon(*line, *words(*options))
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def parameters(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        row["name"]: row for stage in found["stages"] for row in stage["parameters"]
    }


@pytest.mark.parametrize(
    "world, layout",
    [
        (2, f"{TP} 2 --sequence-parallel"),
        (4, f"{PP} 2 --overlap-grad-reduce"),
        (2, EXPERTS),
    ],
    ids=["tp2", "pp2-dp2-overlap", "ep2"],
)
def test_what_is_shown_is_what_the_run_does(world: int, layout: str) -> None:
    """Every line on Muon's share, its momentum, bytes and rounds."""
    run = pretrain(world, MUON, "--bf16", layout)
    found = routes(GPT, MODEL, MOCK, RUN, "--bf16", layout, world=world)
    lines = found["lines"]
    said = [line.removeprefix("[megatron_muon] ") for line in lines]
    assert said and all(text in run for text in said), lines
    assert any("memory: a rank holds the momentum of" in line for line in lines)
    notes = [note for note in found["notes"] if note.startswith("--muon-dp-layout")]
    assert all(note in run for note in notes) and bool(notes) == ("overlap" in layout)
    assert (
        "planned with --optimizer muon, which a run with Muon needs" in found["notes"]
    )


def test_experts_and_latent_attention_are_transformer_engines() -> None:
    """As a run without --transformer-impl builds them: grouped, fused with norms,
    replicated.
    """
    latent = (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
        "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --num-experts 4 "
        "--moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-grouped-gemm --num-layers "
        f"2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {TP} 2 "
        "--sequence-parallel"
    )
    kernels = "--tp-comm-overlap --fp8-format hybrid --moe-token-dispatcher-type flex"
    sizes = SIZES.replace("--group-query-attention --num-query-groups 2 ", "")
    found = routes(GPT, sizes, latent, MOCK, RUN, kernels)
    rows = parameters(found)
    layer = "decoder.layers.1"
    assert rows[f"{layer}.self_attention.linear_q_up_proj.layer_norm_weight"][
        "shape"
    ] == [24]
    down = rows[f"{layer}.self_attention.linear_q_down_proj.weight"]
    cut = version() < (0, 13)  # Megatron has it column-parallel there
    assert (down["tp"], down["shape"]) == (
        ("rows", [12, 64]) if cut else ("replicated", [24, 64])
    )
    experts = [
        rows[f"{layer}.mlp.experts.linear_fc1.weight{expert}"] for expert in range(4)
    ]
    assert [row["ep_rank"] for row in experts] == [0, 0, 1, 1]
    assert all(
        row["shape"] == [64, 64] and row["optimizer"] == "muon" for row in experts
    )
    (left,) = (note for note in found["notes"] if note.startswith("left out"))
    assert all(flag in left for flag in kernels.split() if flag.startswith("--"))


def test_a_hybrid_model_is_what_its_script_builds() -> None:
    """Sizes of the Mamba-2 paper's block: z, x, B, C and dt out of one in_proj."""
    new = version() >= (0, 17)
    pattern = (
        "--hybrid-layer-pattern" if new else "--num-layers 4 --hybrid-override-pattern"
    )
    spec = "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    mamba = "--mamba-state-dim 16 --mamba-head-dim 16 --mamba-num-groups 4"
    options = SIZES, f"{pattern} M*-M", mamba, spec, MOCK, RUN
    rows = parameters(routes(str(CHECKOUT / "pretrain_mamba.py"), *options))
    inner, groups, state, head = 128, 4, 16, 16
    size = 2 * inner + 2 * groups * state + inner // head
    shapes = {
        "in_proj.weight": [size, 64],
        "out_proj.weight": [64, inner],
        "A_log": [inner // head],
        "norm.weight": [inner],
    }
    for layer in (0, 3):
        mixer = f"decoder.layers.{layer}.mixer"
        assert shapes == {name: rows[f"{mixer}.{name}"]["shape"] for name in shapes}
        assert rows[f"{mixer}.out_proj.weight"]["optimizer"] == "muon"
    qkv = rows["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv["shape"] == [128, 64]
    assert rows["decoder.layers.2.mlp.linear_fc2.weight"]["optimizer"] == "muon"


def test_a_vlm_is_what_its_script_builds() -> None:
    vlm = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 1024 "
        "--decoder-seq-length 1024 --max-position-embeddings 4096 --img-h 336 --img-w "
        "336 --patch-dim 14 --bf16 --position-embedding-type rope --dataloader-type "
        "external --disable-vision-class-token --ckpt-format torch"
    )
    rows = parameters(routes(str(CHECKOUT / "pretrain_vlm.py"), vlm, MOCK, RUN))
    fc2 = "decoder.layers.1.mlp.linear_fc2.weight"
    for model in ("language_model", "vision_model"):
        assert rows[f"{model}.{fc2}"]["optimizer"] == "muon"
        assert rows[f"{model}.{fc2}"]["shape"] == [64, 256]
    assert rows["language_model.output_layer.weight"]["optimizer"] == "adamw"


@pytest.mark.slow
def test_presets_are_what_the_script_builds(tmp_path: Path) -> None:
    """Names and shapes of every parameter, at their real sizes, on TP 2 or EP 2."""
    names = ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"]
    # Megatron itself refuses a local one there, for its norm of queries
    if version() < (0, 20):
        names.append("moonlight-16b-a3b")
    run = words(
        "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --transformer-impl local"
    )
    run += words("--tokenizer-type NullTokenizer", "--no-rope-fusion")
    code = (
        "import json, pathlib, sys\n"
        "from megatron_muon.lab.commands import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    assert main(line) == 0, line\n"
        "    stages = json.loads(pathlib.Path(line[2]).read_text())['stages']\n"
        "    rows = [row for stage in stages for row in stage['parameters']]\n"
        "    print('SHAPES', [(row['name'], row['shape'], row['tp']) for row in "
        "rows])\n"
    )
    lines, file = [], str(tmp_path / "routes.json")
    for name in names:
        flags = PRESETS[name]
        ranks = words(
            "--expert-model-parallel-size 2" if "experts" in flags else f"{TP} 2"
        )
        given = words(flags, "--max-position-embeddings 8192")
        at = given.index("--vocab-size") if "--vocab-size" in given else None
        if at is None:  # only later versions take a padded one
            at = given.index("--padded-vocab-size")
            given[at] = "--vocab-size"
        if version() < (0, 18):  # this tokenizer has a token more there
            given[at + 1] = str(int(given[at + 1]) - 1)
        world = ["--world-size", "2"]
        lines.append(["routes", "--json", file, *world, GPT, *given, *ranks, *run])
        lines.append(["routes", "--json", file, "--model", name, *ranks, *world])
    text = done([sys.executable, "-c", code, json.dumps(lines)])
    shapes = [line for line in text.splitlines() if line.startswith("SHAPES")]
    assert len(shapes) == 2 * len(names)
    for name, by_script, by_preset in zip(
        names, shapes[::2], shapes[1::2], strict=True
    ):
        assert by_script == by_preset, name


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    """A missing fused weight, group of experts or layer is more than a hundredth."""
    if version() < (0, 20):
        pytest.skip("not all of these are in this version's scripts")
    total, muon = share(planned(name, CHECKOUT))
    assert (
        total / 1e9 == pytest.approx(SHAPES[name].billions, rel=0.01)
        and muon > total / 2
    )


def test_a_sweep_runs_the_script_again_and_nothing_is_written(tmp_path: Path) -> None:
    """A value that Megatron refuses has its reason; the run's folders are left
    alone.
    """
    save = (
        f"--save {tmp_path}/s --save-interval 2 --tensorboard-dir {tmp_path}/t "
        "--wandb-project p"
    )
    line = f"plan --world-size 4 --sweep tp=1,3,2 --json {tmp_path}/plan.json {GPT}"
    text = muon(*words(line, MODEL, MOCK, RUN, "--bf16", save, "--wandb-exp-name e"))
    assert "3: refused: " in text and "Traceback" not in text
    points = json.loads((tmp_path / "plan.json").read_text())["points"]
    assert [bool(point.get("stages")) for point in points] == [True, False, True]
    assert [point["ranks"]["tp"] for point in points if "ranks" in point] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "options, said",
    [
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag 1"),
        (f"{TP} 3", "world size (2) is not divisible by"),
        (
            "--muon-momentum 1.5",
            "momentum (--muon-momentum) must be in [0, 1), got 1.5",
        ),
        ("--muon-backend upstream", "--muon-backend upstream"),
    ],
)
def test_what_megatron_or_the_plugin_refuses_is_one_line(
    options: str, said: str
) -> None:
    line = words("routes --world-size 2", GPT, MODEL, MOCK, RUN, "--bf16", options)
    text = muon(*line, fails=True)
    assert said in text.strip().split("\n")[-1] and "Traceback" not in text
