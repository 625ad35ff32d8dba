"""Hybrids and other models of this year through Megatron-LM's own scripts, trained on a
CPU.

Their modules are Megatron's own, of Transformer Engine's Python; kernels of state-space
layers are plain torch (``support/ssm_on_cpu.py``). A checkout, Transformer Engine's
Python, and tests/requirements-pretrain.txt installed:

MEGATRON_LM_PATH=... TE=2.12.0 bash tests/run.sh
tests/megatron_lm/pretrain/test_pretrain_models.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support import PYTHON311, ROOT, TESTS, te_on_cpu
from support.expected.oracle import is_muon, qkv_rows
from support.megatron_lm.against_oracle import oracle_of, outside, recorded, stepped
from support.megatron_lm.scripts import (
    CHECKOUT,
    MODEL,
    MUON,
    falling,
    losses,
    needs_checkout,
    pretrain,
    version,
)

pytestmark = [
    needs_checkout,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        te_on_cpu.TE is None, reason="no Transformer Engine on the path"
    ),
]
SCRIPT = TESTS / "support" / "te_on_cpu" / "script"
RUN = (
    f"{MUON} --transformer-impl transformer_engine --normalization RMSNorm "
    "--disable-bias-linear --no-bias-swiglu-fusion --vocab-size 255 --ckpt-format "
    "torch_dist --dist-ckpt-optim-fully-reshardable"
)
HYBRID = "--mamba-head-dim 16 --mamba-num-groups 4 --mamba-state-dim 16"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm "
    "--swiglu"
)
SHARED = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --attention-output-gate"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm"
)
SPARSE = (  # its rotation, a GPU's kernel, is left out
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 4 "
    "--dsa-indexer-head-dim 16 --dsa-indexer-topk 8 --dsa-indexer-loss-coeff 0.01 "
    "--no-dsa-indexer-rotate-activation"
)
HYPER = "--spec support.models.hyper_connections layer"
IN_PROJ = (  # Mamba's is marked as none of Muon's from core 0.20 on
    "--muon-include *in_proj.weight --muon-split *in_proj.weight=parts"
)
# by their sum: z, x, B, C, dt of Mamba-2; query, key, value, z and gates
IN_PROJ_ROWS = {
    392: (128, 128, 64, 64, 8),
    400: (64, 64, 128, 128, 8, 8),
    640: (64, 64, 128, 128, 64, 64, 128),
}
GROUPS = "--group-query-attention --num-query-groups 2 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
DP2 = " "  # two processes
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"
MTP_ALONE = (
    "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Etttt|mm|L"
)
ONE_GROUP = "--num-query-groups 1"  # fewer than TP ranks


@dataclass(frozen=True)
class Model:
    """A family, by its flags.

    Attributes:
        flags: of pretrain_gpt.py, or beside ``pattern``.
        pattern: the layers of a hybrid, with ``|`` between the stages of PP2.
        stack: the spec of a hybrid, by its first words.
    """

    flags: str
    pattern: str = ""
    stack: str = "hybrid"


MODELS = {
    "mamba": Model(HYBRID, "M*|-M"),
    "mamba-latent-experts": Model(
        f"{HYBRID} {EXPERTS} --moe-latent-size 32 {ONE_GROUP}", "M*|EM"
    ),
    "delta": Model(f"{DELTA} --swiglu"),
    "delta-gated-experts": Model(f"{DELTA} {EXPERTS} {SHARED}"),
    "sinks": Model("--softmax-type learnable"),
    "mla-mtp": Model(
        f"{LATENT} {EXPERTS} --moe-layer-freq [0,1,1,1] --mtp-num-layers 2"
    ),
    "sparse-mla": Model(f"{LATENT} {SPARSE} --swiglu"),
    "hyper-connections": Model(f"{HYPER} --enable-mhc-connections --swiglu"),
    "delta-2": Model(
        f"{DELTA} --swiglu --experimental-attention-variant gdn2 {ONE_GROUP}"
    ),
    "delta-product": Model(
        f"{HYBRID} --mamba-num-heads 8", "M*|-M", "gated_delta_product"
    ),
    "dense": Model("--swiglu"),
}
# Of every large script of slime and miles.
ON_HOST = (
    "--bf16 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
    "--use-precision-aware-optimizer"
)
SINCE = {  # the first core with a model
    **dict.fromkeys(("delta" + CP2, "delta-gated-experts" + CP2), (0, 18)),
    **dict.fromkeys(("hyper-connections", "delta-2", "delta-product"), (0, 20)),
    "sparse-mla": (0, 19),
}
LAYOUTS = {
    **dict.fromkeys(
        ("mamba", "delta", "delta-2", "delta-product", "sinks"), (TP2, PP2, CP2)
    ),
    **dict.fromkeys(
        ("mamba-latent-experts", "delta-gated-experts"), (TP2, PP2, CP2, EP2)
    ),
    "mla-mtp": (TP2, CP2, EP2, MTP_ALONE),
    "sparse-mla": (TP2, PP2),
    "hyper-connections": (TP2, CP2, DP2),
}

SWITCHED = [
    ("mamba-latent-experts", TP2),
    ("delta-gated-experts", EP2),
    ("mla-mtp", TP2),
    ("sinks", PP2),
    ("sparse-mla", TP2),
    ("hyper-connections", TP2),
    ("delta-product", TP2),
]


def _command(model: Model, layout: str) -> tuple[Path, str]:
    if not model.pattern:
        return CHECKOUT / "pretrain_gpt.py", model.flags
    if version() < (0, 18):
        spec = (
            "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec "
            "--is-hybrid-model"
        )
        flags = f"{model.flags} --spec {spec} --hybrid-override-pattern"
        return (
            CHECKOUT / "pretrain_mamba.py",
            f"{flags} {model.pattern.replace('|', '')}",
        )
    pattern = model.pattern if layout == PP2 else model.pattern.replace("|", "")
    spec = f"megatron.core.models.hybrid.hybrid_layer_specs {model.stack}_stack_spec"
    flags = f"{model.flags} --spec {spec} --hybrid-layer-pattern {pattern}"
    return CHECKOUT / "pretrain_hybrid.py", flags


def _model(options: str) -> str:
    return MODEL.replace(GROUPS, "") if LATENT in options else MODEL


def _path(*more: Path) -> str:
    on = [SCRIPT, *more, TESTS, ROOT, PYTHON311, os.environ["PYTHONPATH"]]
    return os.pathsep.join(map(str, on))


def trained(name: str, layout: str, *flags: str) -> str:
    """What training a model prints."""
    script, options = _command(MODELS[name], layout)
    processes = {"": 1, MTP_ALONE: 3}.get(layout, 2)
    given = processes, RUN, options, layout, *flags
    return pretrain(*given, script=script, model=_model(options), PYTHONPATH=_path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def needs(name: str, layout: str) -> None:
    if version() < max(SINCE.get(name, (0, 16)), SINCE.get(name + layout, (0, 16))):
        pytest.skip("this core has no such model there")


@cache
def alone(name: str, folder: Path) -> list[float]:
    """The losses of six steps in fp32 on one process, which saves after three."""
    return falling(trained(name, "", f"--save {folder / name} --save-interval 3"))


@pytest.mark.parametrize(
    "name, layout",
    [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]],
    ids=str,
)
def test_a_run_resumes_elsewhere_as_on_one_process(
    name: str, layout: str, folder: Path
) -> None:
    """Forward, backward, step and reshard in one: the next three losses are those of
    one process.

    Sums of another order round otherwise: in fp32 within 2e-5, while a step with
    another rate for one kind of weight differs by more than 1e-3.
    """
    needs(name, layout)
    expected = alone(name, folder)
    text = trained(name, layout, f"--load {folder / name} --ckpt-step 3 --no-load-rng")
    fourth, _, sixth = losses(text)[:3]  # Megatron's second line is the mean of two
    assert [fourth, sixth] == pytest.approx([expected[3], expected[5]], rel=2e-5)


@pytest.mark.parametrize("layout", [TP2, DP2])
def test_hyper_connections_train_in_bf16(layout: str) -> None:
    """Losses are one process's within 2^-7: weights round at 2^-9, so runs drift apart
    by a few.
    """
    needs("hyper-connections", layout)
    one, there = (
        falling(trained("hyper-connections", each, "--bf16")) for each in ("", layout)
    )
    assert there == pytest.approx(one, rel=2**-7)


@pytest.mark.parametrize("name, layout", SWITCHED, ids=str)
def test_a_switch_from_adamw_elsewhere_is_that_on_one_process(
    name: str, layout: str, tmp_path: Path
) -> None:
    """Sums of another order round otherwise; at a tie a token then goes to another
    expert, or sparse attention picks another one: 1e-4 of the loss where it was seen.
    """
    needs(name, layout)
    saved = f"--load {tmp_path} --ckpt-step 3 --no-load-rng"
    adamw = trained(
        name, "", "--optimizer adam", f"--save {tmp_path} --save-interval 3"
    )
    texts = [
        trained(name, each, saved, "--muon-from-adamw momentum")
        for each in ("", layout)
    ]
    assert all("is AdamW's: Muon's momentum starts" in text for text in texts)
    one, there = (losses(text)[:3:2] for text in texts)
    assert there == pytest.approx(one, rel=2e-4)
    assert (
        one[0] == pytest.approx(losses(adamw)[3], rel=2e-5)
        and one[1] != losses(adamw)[5]
    )


def fused_rows(name: str, w: Tensor, flags: str) -> list[list[int]]:
    """The rows of each matrix of a weight, from what its module's forward does with its
    output.
    """
    leaf = name.split(".")[-2]
    if leaf == "linear_qkv":
        groups = 1 if ONE_GROUP in flags else 2
        return qkv_rows(heads=4, groups=groups, head_size=16, gated=DELTA in flags)
    sizes = IN_PROJ_ROWS[w.shape[0]] if leaf == "in_proj" else (w.shape[0],)
    return [part.tolist() for part in torch.arange(w.shape[0]).split(list(sizes))]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "delta-product"])
def test_three_steps_equal_the_oracles(name: str, tmp_path: Path) -> None:
    needs(name, "")
    script, options = _command(MODELS[name], "")
    fused = IN_PROJ if name.startswith(("mamba", "delta")) else ""
    run = recorded(
        *(tmp_path / "run.pt", RUN, options, "--muon-ns-dtype fp32", fused),
        script=script.name, model=_model(options), PYTHONPATH=_path(CHECKOUT),
    )  # fmt: skip
    of_model = {
        "blocks": partial(fused_rows, flags=options),
        "is_muon": lambda n, w: is_muon(n, w) and min(w.shape) > 1,
    }
    oracle = stepped(run, oracle_of(run, **of_model))
    assert outside(run, "fp32", oracle, **of_model) == set()


@pytest.mark.parametrize(
    "layout", [TP2, f"{EP2} --overlap-grad-reduce --overlap-param-gather"]
)
def test_a_run_with_state_on_the_host_resumes_with_the_same_losses(
    layout: str, tmp_path: Path
) -> None:
    """Without the flags they are nearly those: AdamW's part on the host rounds
    otherwise.
    """
    name = "mla-mtp" if EP2 in layout else "dense"
    whole = falling(
        trained(name, layout, ON_HOST, f"--save {tmp_path} --save-interval 3")
    )
    plain = losses(trained(name, layout, "--bf16"))
    assert whole == pytest.approx(plain, rel=2e-3)
    again = losses(trained(name, layout, ON_HOST, f"--load {tmp_path} --ckpt-step 3"))
    assert [again[at] for at in (0, 2)] == [whole[at] for at in (3, 5)]
