"""examples/recipes: what is in force in a model with each file of flags, by the commands
and, with a checkout, by Megatron-LM's own parser.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_muon.settings.config import MuonConfig
from support import ROOT
from support.megatron_lm.scripts import CHECKOUT, done, needs_checkout
from support.processes import report_of

RECIPES = ROOT / "examples" / "recipes"
HEADS = [
    ["*.linear_q_up_proj.weight", "heads"],
    ["*.linear_kv_up_proj.weight", "heads"],
]
# What differs from Moonlight's settings, which are the defaults; lr, min-lr, decay.
RECIPE = {
    "moonlight": ({"weight_decay_all_params": True}, (4.2e-4, 4.2e-5, 0.1)),
    "kimi_k2": ({"qk_clip": 100.0}, (2e-4, 2e-5, 0.1)),
    "glm_4_5": ({"muon_include": ["output_layer.weight"]}, (2.5e-4, 2.5e-5, 0.1)),
    "glm_5": (
        {"muon_include": ["output_layer.weight"], "splits": HEADS},
        (2e-4, 4e-5, 0.1),
    ),
    "deepseek_v4": (
        {
            "ns_coefficients": "deepseekv4",
            "ns_steps": 10,
            "matched_adamw_rms": 0.18,
        },
        (2e-4, 2e-5, 0.1),
    ),
    "trinity_large": (
        {
            "scale_mode": "shape_scaling",
            "matched_adamw_rms": 1.0,
            "by_pattern": [
                "embedding.*:lr=0.0002,min_lr=2e-05",
                "output_layer.*:lr=0.0002,min_lr=2e-05",
            ],
        },
        (8e-4, 8e-5, None),
    ),
    "step_3_5_flash": (
        {"ns_coefficients": "polar_express", "ns_steps": 6, "ns_dtype": "fp16"},
        (2.5e-4, 5e-5, 0.1),
    ),
    "zaya1": ({}, (None, None, None)),
    "muonh": (
        {
            "rule": "hyperball",
            "momentum": 0.98,
            "by_pattern": [
                f"{pattern}:lr=0.0015"
                for pattern in ("embedding.*", "output_layer.*", "*norm*")
            ],
        },
        (0.01, 0.0, 0.0),
    ),
}
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --bf16 "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--transformer-impl local --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 127 --make-vocab-size-divisible-by 1"
).split()
OF_A_RUN = (
    "--mock-data --tokenizer-type NullTokenizer --micro-batch-size 1 --no-rope-fusion "
    "--train-iters 300000 --distributed-backend gloo --rotary-scaling-factor 1"
).split()


def words_of(name: str) -> list[str]:
    return (RECIPES / f"{name}.args").read_text().split()


def of_muon(words: list[str]) -> list[str]:
    """The plugin's flags, which the commands know without a script."""
    flag = ""
    chosen = ["--use-distributed-optimizer"]
    for word in words:
        flag = word if word.startswith("--") else flag
        if flag.startswith("--muon-") or flag == "--weight-decay-all-params":
            chosen.append(word)
    return chosen


def value(words: list[str], flag: str) -> float | None:
    return float(words[words.index(flag) + 1]) if flag in words else None


def test_every_file_is_a_recipe_of_the_page() -> None:
    assert {file.stem for file in RECIPES.glob("*")} == set(RECIPE)
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert all(f"`{name}.args`" in page for name in RECIPE)


@pytest.mark.parametrize(
    "by_script", [False, pytest.param(True, marks=needs_checkout)], ids=["", "script"]
)
@pytest.mark.parametrize("name", RECIPE)
def test_what_the_file_says_is_in_force(
    name: str, by_script: bool, tmp_path: Path
) -> None:
    words = words_of(name)
    line = ["routes", "--world-size", "1"]
    if by_script:
        file = tmp_path / "routes.json"
        line += [
            "--json",
            str(file),
            str(CHECKOUT / "pretrain_gpt.py"),
            *MODEL,
            *OF_A_RUN,
            *words,
        ]
        done([sys.executable, "-m", "megatron_muon", *line])
        found = json.loads(file.read_text())
    else:
        found = report_of(*line, *MODEL, *of_muon(words))
    default = json.loads(json.dumps(asdict(MuonConfig())))
    settings, rates = RECIPE[name]
    in_force = found["settings"]
    changed = {key for key in default if in_force[key] != default[key]}
    assert changed == set(settings)
    assert settings == {key: in_force[key] for key in settings}
    flags = ("--lr", "--min-lr", "--weight-decay")
    assert tuple(value(words, flag) for flag in flags) == rates
    rows = {row["name"]: row for row in found["stages"][0]["parameters"]}
    head = "muon" if name.startswith("glm_") else "adamw"
    assert rows["output_layer.weight"]["optimizer"] == head
    assert rows["embedding.word_embeddings.weight"]["optimizer"] == "adamw"
    up = rows["decoder.layers.0.self_attention.linear_q_up_proj.weight"]
    assert len(up["matrices"]) == (4 if name == "glm_5" else 1)
