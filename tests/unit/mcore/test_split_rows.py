"""Splits that no small Megatron model of the tests has: by the class that holds a
weight.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import CrossAttention

from megatron_muon.mcore.routing.matrices import matrices_of
from megatron_muon.mcore.routing.param_routing import Weight
from megatron_muon.mcore.routing.splits import fused_of
from megatron_muon.settings.config import MuonConfig

LATENT = {
    "num_attention_heads": 2,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "kv_lora_rank": 6,
    "q_lora_rank": 8,
}


def _weight(name: str, rows: int, holder: torch.nn.Module, **sizes: Any) -> Weight:
    leaf = name.split(".")[-2]
    linear = torch.nn.Linear(3, rows, bias=False)
    torch.nn.Module.__setattr__(holder, leaf, linear)
    config = SimpleNamespace(gated_linear_unit=False, **sizes)
    holder.config = config  # type: ignore[assignment]
    return Weight(name, linear.weight, linear, (holder,), config, ".experts." in name)


def _held_by(
    class_name: str, base: type[torch.nn.Module] = torch.nn.Module
) -> torch.nn.Module:
    """A module of a class that is only a name here, without the sizes that Megatron's
    wants.
    """
    kind = type(class_name, (base,), {"__init__": torch.nn.Module.__init__})
    made: torch.nn.Module = kind()
    return made


def _parts(weight: Weight, rows: int, kind: Any) -> list[list[tuple[str, int]]]:
    fused = fused_of(weight, rows)
    assert fused is not None
    return [
        [(each.part, each.count) for each in section] for section in fused.splits[kind]
    ]


def test_a_fused_down_projection_has_three_parts() -> None:
    """Megatron's FusedMLASelfAttention of newer cores: q's latent, then k and v's with
    rope.
    """
    name = "decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    weight = _weight(name, 16, _held_by("MultiLatentAttention"), **LATENT)
    assert _parts(weight, 16, "parts") == [
        [("q_latent", 8)],
        [("latent", 6), ("rope", 2)],
    ]


@pytest.mark.parametrize(
    "name, setting",
    [
        ("mlp.experts.local_experts.0.linear_fc1", "moe_mlp_glu_interleave_size"),
        ("mlp.shared_experts.linear_fc1", "moe_shared_expert_glu_interleave_size"),
    ],
)
def test_gate_and_up_in_alternating_blocks_are_two_matrices(
    name: str, setting: str
) -> None:
    weight = _weight(
        f"decoder.layers.0.{name}.weight", 12, _held_by("MLP"), **{setting: 3}
    )
    weight.model_config.gated_linear_unit = True
    assert _parts(weight, 12, "gate-up") == [
        [("gate", 3), ("up", 3), ("gate", 3), ("up", 3)]
    ]


def test_a_cross_attention_is_split_by_head() -> None:
    sizes = {"num_attention_heads": 2, "kv_channels": 3}
    holder = _held_by("Mine", CrossAttention)
    weight = _weight(
        "decoder.layers.0.cross_attention.linear_kv.weight", 12, holder, **sizes
    )
    assert _parts(weight, 12, "qkv") == [[("k", 3), ("v", 3), ("k", 3), ("v", 3)]]
    assert _parts(weight, 12, "heads") == [
        [("k 0", 3), ("v 0", 3), ("k 1", 3), ("v 1", 3)]
    ]
    weight = _weight(
        "decoder.layers.0.cross_attention.linear_q.weight", 6, holder, **sizes
    )
    assert _parts(weight, 6, "heads") == [[("q 0", 3), ("q 1", 3)]]


@pytest.mark.parametrize(
    "kind", "rows: rows:8 rows:4,0 heads:0 groups:2 cols:a,b".split()
)
def test_a_split_of_ones_own_needs_sizes(kind: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of whole, .*, rows:A,B,.*, got"):
        MuonConfig(splits=(("*", kind),))


@pytest.mark.parametrize(
    "kind, held",
    [
        # each is cut by itself
        ("rows:4,8", [("part 0", 0, 2, 2), ("part 1", 2, 6, 4)]),
        (
            "groups:3:1,3",
            [("part 1", 0, 2, 4), ("part 0", 2, 3, 2), ("part 1", 3, 6, 6)],
        ),
        ("groups:1:4,8", [("part 1", 0, 6, 2)]),
        ("heads:3", [("head 1", 0, 2, 2), ("head 2", 2, 6, 0)]),
    ],
)
def test_where_rows_are_unknown_tp_cuts_what_the_user_says(
    kind: str, held: list[tuple[str, int, int, int]]
) -> None:
    """What the second of two TP ranks holds of 12 rows, and the rows of the
    matrices.
    """
    weight = _weight("decoder.layers.0.indexer.linear_q.weight", 6, _held_by("Indexer"))
    for name, value in {"tensor_model_parallel": True, "partition_dim": 0}.items():
        setattr(weight.param, name, value)
    of_two = replace(weight, tp_size=2)
    made = matrices_of(of_two, MuonConfig(splits=(("*", kind),)))
    names = [matrix.name.partition("[")[2].rstrip("]") for matrix in made.matrices]
    blocks = [
        (names[b.matrix], b.rows.start, b.rows.stop, b.matrix_row)
        for b in made.blocks[1]
    ]
    assert blocks == held
