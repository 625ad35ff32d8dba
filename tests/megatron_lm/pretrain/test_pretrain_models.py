"""Hybrids and other models of this year through Megatron-LM's own scripts, trained on a CPU.

Their modules are Megatron's own, of Transformer Engine's Python; kernels of state-space layers are
plain torch (``support/ssm_on_cpu.py``). A checkout, Transformer Engine's Python, and
tests/requirements-pretrain.txt installed:

MEGATRON_LM_PATH=... TE=2.12.0 bash tests/run.sh tests/megatron_lm/pretrain/test_pretrain_models.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from support import PYTHON311, ROOT, TESTS, te_on_cpu
from support.megatron_lm.scripts import (
    CHECKOUT,
    MODEL,
    MUON,
    losses,
    needs_checkout,
    pretrain,
    version,
)

pytestmark = [
    needs_checkout,
    pytest.mark.timeout(900),
    pytest.mark.skipif(te_on_cpu.TE is None, reason="no Transformer Engine on the path"),
]
SCRIPT = TESTS / "support" / "te_on_cpu" / "script"
RUN = (
    f"{MUON} --transformer-impl transformer_engine --normalization RMSNorm --disable-bias-linear "
    "--no-bias-swiglu-fusion --vocab-size 255 --ckpt-format torch_dist "
    "--dist-ckpt-optim-fully-reshardable"
)
HYBRID = "--mamba-head-dim 16 --mamba-num-groups 4 --mamba-state-dim 16"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-grouped-gemm --swiglu"
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
GROUPS = "--group-query-attention --num-query-groups 2 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"


@dataclass(frozen=True)
class Model:
    """A family, by its flags."""

    flags: str  # of pretrain_gpt.py, or beside ``pattern``
    pattern: str = ""  # the layers of a hybrid, with ``|`` between the stages of PP2


MODELS = {
    "mamba": Model(HYBRID, "M*|-M"),
    "mamba-latent-experts": Model(f"{HYBRID} {EXPERTS} --moe-latent-size 32", "M*|EM"),
    "delta": Model(f"{DELTA} --swiglu"),
    "delta-gated-experts": Model(f"{DELTA} {EXPERTS} {SHARED}"),
    "sinks": Model("--softmax-type learnable"),
    "mla-mtp": Model(f"{LATENT} {EXPERTS} --moe-layer-freq [0,1,1,1] --mtp-num-layers 2"),
}
SINCE = {("delta", CP2): (0, 18)}
LAYOUTS = {
    **dict.fromkeys(("mamba", "delta"), (TP2, PP2, CP2)),
    **dict.fromkeys(("mamba-latent-experts", "delta-gated-experts"), (TP2, EP2)),
    **{"sinks": (TP2, PP2), "mla-mtp": (TP2, EP2)},
}


def _command(model: Model, layout: str) -> tuple[Path, str]:
    if not model.pattern:
        return CHECKOUT / "pretrain_gpt.py", model.flags
    if version() < (0, 18):
        spec = "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --is-hybrid-model"
        flags = f"{model.flags} --spec {spec} --hybrid-override-pattern"
        return CHECKOUT / "pretrain_mamba.py", f"{flags} {model.pattern.replace('|', '')}"
    pattern = model.pattern if layout == PP2 else model.pattern.replace("|", "")
    spec = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    flags = f"{model.flags} --spec {spec} --hybrid-layer-pattern {pattern}"
    return CHECKOUT / "pretrain_hybrid.py", flags


def trained(name: str, layout: str, *flags: str) -> str:
    """What training a model prints."""
    script, options = _command(MODELS[name], layout)
    on = [SCRIPT, TESTS, ROOT, PYTHON311, os.environ["PYTHONPATH"]]
    path = os.pathsep.join(map(str, on))
    processes = 2 if layout else 1
    model = MODEL.replace(GROUPS, "") if LATENT in options else MODEL
    given = RUN, options, layout, *flags
    return pretrain(processes, *given, script=script, model=model, PYTHONPATH=path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def alone(name: str, folder: Path) -> list[float]:
    """The losses of six steps in fp32 on one process, which saves after three."""
    return losses(trained(name, "", f"--save {folder / name} --save-interval 3"))


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in MODELS for layout in LAYOUTS[name]], ids=str
)
def test_a_run_goes_on_elsewhere_as_on_one_process(name: str, layout: str, folder: Path) -> None:
    """Forward, backward, step and reshard in one: the next three losses are those of one process.

    Sums of another order round otherwise: in fp32 within 2e-5, while a step with another rate for
    one kind of weight differs by more than 1e-3.
    """
    if version() < SINCE.get((name, layout), (0, 16)):
        pytest.skip("this core has no such model there")
    expected = alone(name, folder)
    assert len(expected) >= 6 and expected[5] < expected[2] < expected[0]
    text = trained(name, layout, f"--load {folder / name} --ckpt-step 3 --no-load-rng")
    fourth, _, sixth = losses(text)[:3]  # Megatron's second line is the mean of two
    assert [fourth, sixth] == pytest.approx([expected[3], expected[5]], rel=2e-5)
