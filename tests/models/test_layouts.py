"""The layout that a run takes by itself: by both speeds at its start, later as it was
saved.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from figures.stages import hardware_of, stage_of, step_of
from megatron_muon.lab.dry_run.stages import built, in_stage
from megatron_muon.mcore.host.loop import host, set_host
from megatron_muon.mcore.load_check import digest
from megatron_muon.mcore.wiring.buffers import bucket_layout
from megatron_muon.megatron_lm import checkpointing, install
from megatron_muon.megatron_lm.bucketing import note, saved_layout
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.buckets.count import SLACK, Buffer, cost
from megatron_muon.planning.buckets.layout import (
    Layout,
    at_reference,
    choose_layout,
    grid_of_holders,
    in_place,
)
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.plans import (
    GPT_340M,
    LLAMA_8B,
    OVERLAP,
    QWEN3_30B,
    run_of,
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


def chosen_of(words: str) -> tuple[Layout, list[Buffer]]:
    """The layout that a run chooses from its first stage's buffers, and these."""
    seen: list[Buffer] = []

    def choose(buffers: Sequence[Buffer], *args: Any, **options: Any) -> Layout:
        seen.extend(buffers)
        return choose_layout(buffers, *args, **options)

    run = run_of(words.split())
    with mock.patch.object(bucket_layout, "choose_layout", choose), in_stage(0, run):
        layout = built(run).layout
    assert layout is not None
    return layout, seen


# The number that 0.2.0 chose from its flags, and the one that is chosen from the model's
# parameters where it differs. 0.2.0 left out routers and norms, which move the end of
# a bucket by a whole expert. It also left out layers of multi-token prediction, gave
# every stage as many layers, and chose nothing for a hybrid model.
NUMBERS: dict[str, tuple[int, int | None]] = {
    f"{LLAMA_8B} --world-size 8": (8, None),
    "--model llama3-8b --tp 8 --pp 4": (3, None),
    "--model llama3-8b --pp 4 --num-virtual-stages-per-pipeline-rank 2": (4, None),
    "--model llama3-70b --tp 8": (22, None),
    "--model llama3-70b --tp 8 --pp 4": (6, None),
    f"{GPT_340M} --world-size 16": (5, None),
    f"{QWEN3_30B} --ep 8": (72, 13),
    "--model qwen3-30b-a3b --tp 2 --ep 8": (22, 57),
    "--model qwen3-30b-a3b --pp 4 --ep 16": (9, 14),
    "--model moonlight-16b-a3b --ep 8": (33, None),
    "--model moonlight-16b-a3b --tp 2 --ep 8": (18, 13),
    "--model deepseek-v3 --ep 64": (30, None),
    "--model kimi-k2 --ep 64": (27, 30),
}


@pytest.mark.parametrize("words", NUMBERS)
def test_the_number_is_that_of_0_2_0_or_costs_less(words: str) -> None:
    """By the bytes of the last buckets and of the exchange, up to ``SLACK``."""
    chosen, buffers = chosen_of(f"{words} {OVERLAP} --muon-dp-layout contiguous")
    before, other = NUMBERS[words]
    assert chosen.number is not None and chosen.number == (other or before)
    buffers = at_reference(buffers)
    numel = sum(buffer.numel for buffer in buffers)
    costs = [cost(buffers, numel // number) for number in (before, chosen.number)]
    assert costs[1].total <= SLACK * costs[0].total


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_parameters_lie_where_megatron_puts_them(words: str) -> None:
    words += " --muon-split-matrices off --muon-dp-layout contiguous"
    chosen, buffers = chosen_of(words)
    assert chosen.number is not None
    size = sum(buffer.numel for buffer in buffers) // chosen.number
    numerics = Numerics(MuonConfig(split_matrices="off"), "cuda")
    plans = [one.plan for one in stage_of(words)[1]]
    for buffer, plan in zip(buffers, plans, strict=True):
        found = in_place(buffer, numerics, size)
        assert grid_of_holders(buffer.holders, 8).ranks == plan.grid.ranks
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


def test_cpus_need_a_stated_link_to_choose() -> None:
    """Of a run whose bucketed step is shorter on GPUs, too."""
    words = f"--model moonlight-16b-a3b --ep 8 --world-size 256 {OVERLAP}"
    _, buffers = chosen_of(f"{words} --muon-dp-layout contiguous")
    fast = MuonConfig(preset="fast")
    taken = [
        choose_layout(buffers, numerics, may_be_bucketed=may_be_bucketed).name
        for numerics, may_be_bucketed in (
            (Numerics(fast, "cuda"), True),
            (Numerics(fast, "cuda"), False),
            (Numerics(fast, "cpu"), True),
            (Numerics(replace(fast, link_gbytes=40.0), "cpu"), True),
        )
    ]
    assert taken == ["bucketed", "contiguous", "contiguous", "bucketed"]


def test_a_number_of_buckets_leaves_nothing_to_choose() -> None:
    words = f"{RUNS['Llama-3-8B TP8 DP4']}--muon-preset fast --muon-rank-tflops 600"
    taken = {
        flags: run_of(f"{words} --muon-link-gbytes 12 {flags}".split()).layout
        for flags in ("", "--ddp-num-buckets 8", "--ddp-bucket-size 9")
    }
    assert list(taken.values()) == ["bucketed", "contiguous", "contiguous"]


def test_a_run_from_a_checkpoint_keeps_its_layout(tmp_path: Path) -> None:
    given = {"muon_dp_layout": "contiguous", "overlap_grad_reduce": True, "load": None}
    given |= {"ddp_num_buckets": None, "ddp_bucket_size": None}

    def taken(
        folder: Path | None, config: MuonConfig = LINK, **others: object
    ) -> tuple[str, tuple[str, ...]]:
        args = Namespace(**given | {"non_persistent_ckpt_type": None} | others)
        with (
            mock.patch.object(checkpointing, "newest", lambda *_: folder),
            mock.patch("megatron_muon.mcore.wiring.install.settings", lambda: config),
        ):
            before = host()
            install._set_layouts(args, is_free=True)
            left = host().layouts()
            set_host(before)
        return args.muon_dp_layout, left

    assert taken(None) == ("contiguous", ("contiguous", "bucketed"))
    without_digest = replace(LINK, checkpoint_digest=False)  # no resume would know
    assert taken(None, without_digest) == ("contiguous", ("contiguous",))
    # no digest is in a local checkpoint
    local = taken(None, non_persistent_ckpt_type="local")
    assert local == ("contiguous", ("contiguous",))
    for layout, left in (("contiguous", ("contiguous",)), ("bucketed", ())):
        note(layout)
        digest.begin(tmp_path, {})
        digest.finish(tmp_path, {"wrote": {}, "save": None, "optimizer": "muon"})
        assert saved_layout(tmp_path) == layout
        assert taken(tmp_path) == (layout, left)
    note("contiguous")
    assert taken(tmp_path / "without a digest")[0] == "contiguous"
