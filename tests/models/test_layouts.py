"""The number of buckets that a run takes by itself, and what lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest

from figures.stages import stage_of
from megatron_muon.lab.dry_run.stages import built, in_stage
from megatron_muon.mcore.wiring.buffers import bucket_layout
from megatron_muon.planning.buckets import (
    SLACK,
    Buckets,
    Buffer,
    choose_buckets,
    cost,
    in_buckets,
)
from support.buckets import placed
from support.virtual_gpu.plans import (
    GPT_340M,
    LLAMA_8B,
    OVERLAP,
    QWEN3_30B,
    run_of,
)

RUNS = {
    "Llama-3-8B TP1 DP8": f"{LLAMA_8B} {OVERLAP} --world-size 8 ",
    "Llama-3-8B TP1 DP16": f"{LLAMA_8B} {OVERLAP} --world-size 16 ",
    "Llama-3-8B TP8 DP4": f"{LLAMA_8B} {OVERLAP} --tp 8 --world-size 32 ",
    "Qwen3-30B-A3B EP8": f"{QWEN3_30B} {OVERLAP} --ep 8 --world-size 64 ",
} | {
    f"340M DP{size}": f"{GPT_340M} {OVERLAP} --world-size {size} "
    for size in (16, 32, 64)
}


def chosen_of(words: str) -> tuple[Buckets, list[Buffer]]:
    """What a run chooses from its first stage's buffers, and these."""
    seen: list[Buffer] = []

    def choose(buffers: Sequence[Buffer]) -> Buckets:
        seen.extend(buffers)
        return choose_buckets(buffers)

    run = run_of(words.split())
    with mock.patch.object(bucket_layout, "choose_buckets", choose), in_stage(0, run):
        return built(run).buckets, seen


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
    chosen, buffers = chosen_of(f"{words} {OVERLAP}")
    before, other = NUMBERS[words]
    assert chosen.number is not None and chosen.number == (other or before)
    numel = sum(weight.numel for buffer in buffers for weight in buffer)
    costs = [cost(buffers, numel // number) for number in (before, chosen.number)]
    assert costs[1].total <= SLACK * costs[0].total


@pytest.mark.parametrize("words", [LLAMA_8B, f"{QWEN3_30B} --ep 8"])
def test_the_number_does_not_depend_on_the_ranks(words: str) -> None:
    """AdamW's dp_reshardable loads at another DP size, but not into other buckets."""
    few, many = (
        chosen_of(f"{words} {OVERLAP} --world-size {size}")[0] for size in (8, 512)
    )
    assert few.number == many.number is not None


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_parameters_lie_where_megatron_puts_them(words: str) -> None:
    words += " --muon-split-matrices off"
    chosen, buffers = chosen_of(words)
    assert chosen.number is not None
    size = sum(weight.numel for each in buffers for weight in each) // chosen.number
    plans = [one.plan for one in stage_of(words)[1]]
    for buffer, plan in zip(buffers, plans, strict=True):
        dp_size = len(plan.grid.ranks[0][0])
        buckets = list(in_buckets(buffer, size, dp_size))
        count = sum(weight.is_muons for weight in buffer)
        assert len(plan.parameters) == count * len(plan.grid.ranks)
        for at in range(0, len(plan.parameters), count):  # on each EP rank
            theirs = plan.parameters[at : at + count]
            muons = iter(theirs)
            own = [next(muons) if weight.is_muons else None for weight in buffer]
            assert placed(own, buckets) == list(theirs)
