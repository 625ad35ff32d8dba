"""The layout that a run takes by itself: by both speeds at its start, later as it was
saved.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_muon.megatron_lm.layouts import _located, note, own_layout

from figures.stages import hardware_of, stage_of, step_of
from megatron_muon.mcore.load_check import digest
from megatron_muon.megatron_lm.bucketing import REFERENCE_DP_SIZE, buffers
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import choose
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import (
    GPT_340M,
    LLAMA_8B,
    OVERLAP,
    QWEN3_30B,
    flags_of,
)

LINK = MuonConfig(preset="fast", link_gbytes=12.0, rank_tflops=600.0)
RUNS = {
    "Llama-3-8B TP1 DP8": f"{LLAMA_8B} {OVERLAP} --world-size 8 ",
    "Llama-3-8B TP1 DP16": f"{LLAMA_8B} {OVERLAP} --world-size 16 ",
    "Llama-3-8B TP8 DP4": f"{LLAMA_8B} {OVERLAP} --tp 8 --world-size 32 ",
    "Qwen3-30B-A3B EP8": f"{QWEN3_30B} {OVERLAP} --ep 8 --world-size 64 ",
} | {
    f"340M DP{size}": f"{GPT_340M} {OVERLAP} --world-size {size} "
    for size in (16, 32, 64)
}


def arguments(words: str) -> Namespace:
    """Megatron-LM's, validated, of a run that leaves layout and buckets free."""
    from megatron_muon.lab.dry_run.model import ranks_of, validated

    flags = flags_of(words.split())
    return Namespace(
        **vars(validated(flags, ranks_of(flags))) | {"ddp_num_buckets": None}
    )


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_parameters_lie_where_megatron_puts_them(words: str) -> None:
    args = arguments(words)
    config = MuonConfig(split_matrices="off")
    chosen = choose(buffers(args, REFERENCE_DP_SIZE))
    assert chosen is not None
    made = buffers(args, 1, norms=True)
    size = sum(weight.numel for one in made for weight in one.weights) // chosen.number
    plans = [one.plan for one in stage_of(f"{words} --muon-split-matrices off")[1]]
    for buffer, plan in zip(made, plans, strict=True):
        numerics = Numerics(config, "cuda")
        found, grid = _located(
            buffer, args, numerics, size, in_order=config.align_shards
        )
        assert grid.ranks == plan.grid.ranks
        for ours, theirs in zip(found, plan.parameters, strict=True):
            assert (ours.span, ours.bucket) == (theirs.span, theirs.bucket)
            shapes = [
                [(m.rows, m.cols) for m in each.matrices] for each in (ours, theirs)
            ]
            assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("name", "link"),
    [
        *itertools.product(["Llama-3-8B TP1 DP8", "Llama-3-8B TP8 DP4"], [3, 12, 200]),
        *itertools.product(["340M DP16", "340M DP32", "340M DP64"], [3, 25]),
        ("Llama-3-8B TP1 DP16", 200),
    ],
)
def test_with_both_speeds_a_run_has_the_faster_layout(name: str, link: int) -> None:
    """Within 5 % by the time model."""
    words = (
        f"{RUNS[name]}--muon-preset fast --muon-rank-tflops 600 --muon-link-gbytes "
        f"{link}"
    )
    hardware = hardware_of(link, link if name.endswith("TP1 DP8") else max(link, 315))
    free, *others = (
        step_of(f"{words} {layout}", hardware).seconds
        for layout in ("", "--muon-dp-layout contiguous", "--muon-dp-layout bucketed")
    )
    assert free <= 1.05 * min(others)


def test_only_a_start_with_a_stated_link_takes_another_layout(tmp_path: Path) -> None:
    args = arguments(RUNS["Llama-3-8B TP8 DP4"])

    def taken(
        config: MuonConfig = LINK, folder: Path | None = None, **given: object
    ) -> str:
        return own_layout(Namespace(**vars(args) | given), config, "cuda", folder)[0]

    assert taken() == "bucketed"
    for config in (MuonConfig(), replace(LINK, homes="balanced")):
        assert taken(config) == "contiguous"
    # no resume would know
    assert taken(replace(LINK, checkpoint_digest=False)) == "contiguous"
    for given in (
        {"overlap_grad_reduce": False},
        {"ddp_num_buckets": 8},
        {"ddp_bucket_size": 9},
    ):
        assert taken(**given) == "contiguous"
    for layout in ("contiguous", "bucketed"):
        note(layout)
        digest.begin(tmp_path, {})
        digest.finish(tmp_path, {"wrote": {}, "save": None, "optimizer": "muon"})
        for config in (LINK, MuonConfig()):
            assert taken(config, tmp_path) == layout
    note("contiguous")
    assert taken(folder=tmp_path / "without a digest") == "contiguous"
