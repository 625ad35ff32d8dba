"""The largest logits of real attentions, by head group: over TP ranks those of one process.

Transformer Engine, whose attention keeps them in Megatron, needs a GPU. A hook keeps them here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.installed import VERSION
from support.models.gpt import each_chunk
from support.ranks import run
from support.runs.cases import GROUPS, HEADS, Topology
from support.runs.training import MODEL, spread, train
from support.runs.watching import records

pytestmark = pytest.mark.skipif(
    VERSION < (0, 13),
    reason="the model is built with vp_stage; test_pretrain_watch.py has core 0.12",
)
MUON = replace(MODEL, steps=2, optimizer="muon")


def _train(topology: Topology, path: str) -> list[float]:
    """A run that logs; and the largest logit of each of layer 0's heads here in the last step."""
    seen = []

    def watch(chunk: Any) -> None:
        for module in chunk.modules():
            if hasattr(module, "core_attention"):
                module.config.log_max_attention_logit = True
                _keep(module.core_attention)
                seen.append(module.core_attention)

    with each_chunk(watch):
        train(replace(MUON, muon=(("log_interval", 2), ("log_file", path))), topology)
    return [float(logit) for logit in seen[0].current_max_attn_logits]


def _keep(core: Any) -> None:
    """Keep the largest logit of each head, under Megatron's name and until it is None."""
    core.current_max_attn_logits = None

    def before_softmax(module: Any, given: tuple[Any, ...]) -> None:
        largest = given[0].detach().amax(dim=(0, 2, 3))
        before = core.current_max_attn_logits
        core.current_max_attn_logits = largest if before is None else before.maximum(largest)

    core.scale_mask_softmax.register_forward_pre_hook(before_softmax)


def _logged(path: Path) -> dict[str, float]:
    _, step = records(path)
    return {row: numbers["max_logit"] for row, numbers in step["logits"].items()}


def test_logits_are_those_of_one_process(tmp_path: Path) -> None:
    alone, cut = tmp_path / "alone.jsonl", tmp_path / "cut.jsonl"
    (heads,) = run(_train, 1, Topology(), str(alone))
    logged = _logged(alone)
    groups = torch.tensor(heads).view(GROUPS, HEADS // GROUPS).amax(1).tolist()
    names = [f"decoder.layers.{layer}.self_attention" for layer in range(MUON.layers)]
    assert list(logged) == [f"{name}[group {group}]" for name in names for group in range(GROUPS)]
    assert list(logged.values())[:GROUPS] == pytest.approx(groups, rel=1e-5)
    run(_train, 2, spread(tp=2), str(cut))
    assert _logged(cut) == pytest.approx(logged, rel=1e-3)
