"""QK-Clip on shards is Megatron's clip of whole weights, bit for bit, in every
layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ranks.te.test_on_host import HALVES, HOSTED
from ranks.te.test_precision_aware import SHARDS, WHOLE, _weight
from support.installed import VERSION
from support.marks import needs_te
from support.models.clipped import clipped, clipped_whole
from support.models.gpt import muon_weights, on_ranks
from support.models.gpt_model import takes_te
from support.ranks import RankError, run
from support.runs.cases import Case, Topology
from support.runs.topologies import (
    DP3,
    DP3_OVERLAP,
    DP4_INSTANCES2,
    ONE,
    PP2_DP2,
    PP2_DP2_CHUNKS2,
    TP2_CP2,
    TP2_DP2,
    TP2_DP2_OVERLAP,
    TP2_DP2_OVERLAP_SP,
    TP4,
)
from support.runs.whole import Whole, differences, whole

megatrons = pytest.mark.skipif(VERSION < (0, 16), reason="this core has no --qk-clip")

PLAIN = Case(qk_clip=(100.0, 0.5))
NORMUON = PLAIN.with_muon(rule="normuon")
OURS = Case().with_muon(qk_clip=100.0)


@cache
def _whole(case: Case, dtype: torch.dtype = torch.float32) -> Whole:
    """Clipped by Megatron, where it can: it knows no gates, and older cores have no
    clip.
    """
    by_hand = case.output_gate or case.qk_clip is None
    return whole(run(clipped_whole, 1, case, dtype, by_hand))


def _check(case: Case, topology: Topology, dtype: torch.dtype = torch.float32) -> Any:
    result = whole(on_ranks(clipped, case, topology, dtype))
    assert differences(_whole(case, dtype), result) == []
    return result


GROUP_ON_TWO = replace(PLAIN, heads=8, groups=2, optimizer="adam")


@megatrons
@pytest.mark.parametrize(
    "case, topology",
    [
        (PLAIN, ONE),
        (PLAIN, DP3),
        (PLAIN, TP2_DP2_OVERLAP_SP),
        (replace(PLAIN, layers=4), PP2_DP2_CHUNKS2),
        # TP cuts columns: the order of NorMuon's sums along them differs
        (NORMUON, PP2_DP2),
        (PLAIN, TP2_CP2),
        (PLAIN, DP4_INSTANCES2),
        (GROUP_ON_TWO, TP4),  # Megatron's own clip fails with TP
    ],
)
def test_a_clip_of_shards_is_that_of_whole_weights(
    case: Case, topology: Topology
) -> None:
    _check(case, topology)


@megatrons
@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 6},
        {"groups": 1},
        {"bf16": False},
        {"bf16": False, "fp16": True},
        {"qk_clip": (100.0, 0.3)},
        {"muon": (("split_qkv", False),)},
        {"muon": (("splits", (("*qkv.weight", "heads"),)),)},
        {"optimizer": "adam"},
        {"frozen": ("*layers.0.self_attention.linear_qkv.weight",)},
        {"moe": True},
        {"output_gate": True},
        {"mla": "column"},
        {"mla": "column", "qk_clip": (100.0, 0.3)},
        {"mla": "column", "muon": (("splits", (("*up_proj.weight", "heads"),)),)},
        {"mla": "column", "latent_biases": True},
        {"mla": "duplicated", "latent_biases": True, "optimizer": "adam"},
        {"frozen": ("*layers.0.self_attention.linear_qkv.bias",)},
        {"sinks": True, "te_attention": False},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_a_clip_of_shards_is_that_of_whole_weights_in_every_model(
    changes: dict[str, Any],
) -> None:
    case = replace(PLAIN, **changes)
    tp = 1 if case.groups == 1 else 2
    _check(
        case, Topology(tp=tp, dp=2, ep=2 if case.moe else 1, sequence_parallel=case.moe)
    )


@megatrons
def test_logits_in_bf16_are_clipped_in_bf16_as_megatron_does() -> None:
    _check(PLAIN, TP2_DP2, torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": "adam"},
        {"bf16": False},
        {"mla": "column"},
        {"mla": "column", "latent_biases": True},
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_the_plugins_own_flag_clips_at_the_end_of_a_step(
    changes: dict[str, Any],
) -> None:
    """Over Transformer Engine's attention it is refused: Megatron's own flag is for
    that.
    """
    case = replace(OURS, **changes)
    if takes_te(case):
        with pytest.raises(
            RankError, match="computes its logits in a TEDotProductAttention"
        ):
            on_ranks(clipped, case, TP2_DP2_OVERLAP)
        return
    _check(case, TP2_DP2_OVERLAP)


in_two_ways = pytest.mark.parametrize(
    "topology", [TP2_DP2, DP3_OVERLAP], ids=["late", "overlap"]
)


@megatrons
@needs_te
def test_a_learned_sink_over_transformer_engine_is_refused() -> None:
    """cuDNN's largest logit is that of logits and sink, and a clip scales no sink."""
    with pytest.raises(RankError, match=r"core_attention\.softmax_offset may be part"):
        on_ranks(clipped, replace(PLAIN, sinks=True), ONE)


@megatrons
@needs_te
@pytest.mark.parametrize(
    "optimizer, narrow",
    [("muon", narrow) for narrow in ((), WHOLE, SHARDS, HOSTED.narrow, HALVES.narrow)]
    + [("adam", ()), ("adam", HOSTED.narrow)],
)
@in_two_ways
def test_main_parameters_are_clipped_wherever_they_are(
    optimizer: str, narrow: Any, topology: Topology
) -> None:
    """The result is that of fp32 shards, and a weight is its main parameter, rounded
    once.
    """
    case = replace(PLAIN, narrow=narrow, optimizer=optimizer)
    result = _with_plain_main_parameters(case, topology)
    names = muon_weights(case)
    if narrow is not SHARDS:
        rounded = (
            case if narrow in ((), HALVES.narrow) else replace(PLAIN, narrow=WHOLE)
        )
        mains = {name: _weight(result["main"][name], rounded, name) for name in names}
        assert [
            n for n in names if not torch.equal(mains[n], result["params"][n])
        ] == []


@megatrons
@needs_te
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@in_two_ways
def test_weights_in_fp8_are_quantized_from_clipped_main_parameters(
    recipe: str, topology: Topology
) -> None:
    result = _with_plain_main_parameters(replace(PLAIN, fp8=recipe), topology)
    for name in (name for name in muon_weights(PLAIN) if "qkv" in name):
        main, weight = result["main"][name], result["params"][name]
        # e4m3 has 3 bits beside the first, from 2^-6 on; delayed, the scale is still 1
        least = 2**-6 if recipe == "delayed" else main.abs().max() / 448
        steps = main.abs().clamp_min(least)
        assert ((weight - main).abs() / steps).max() <= 0.07, name


def _with_plain_main_parameters(case: Case, topology: Topology) -> Whole:
    plain = _whole(replace(case, narrow=None, fp8=""))
    result = whole(on_ranks(clipped, case, topology))
    apart = 2e-5 if (case.optimizer, case.narrow) == ("adam", HOSTED.narrow) else 0
    for kind in ("main", "exp_avg"):  # torch's AdamW on a CPU rounds a tail otherwise
        for name in muon_weights(case):
            one, other = plain[kind][name], result[kind][name]
            assert torch.allclose(one, other, rtol=apart, atol=1e-2 * apart), (
                kind,
                name,
            )
    return result
