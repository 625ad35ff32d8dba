"""Where bits are promised, a GPU computes a matrix by the same operations in every layout."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import megatron_muon.runtime.round
from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import gram
from megatron_muon.orthogonalize.numerics import layout_free
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.tensors import VirtualTensor
from support.virtual_gpu.plans import small_plan
from support.virtual_gpu.step import record_step

# Their sums go by shapes and strides: products, and norms by kernels and by torch.
SUMS = {"mm", "addmm", "bmm", "baddbmm", "divisors", "linalg_vector_norm"}
LAYOUTS = ((1, 2, None), (2, 2, None), (2, 2, 1), (4, 1, None), (1, 3, 1))  # TP, DP, round's bytes
Sums = dict[tuple[int, int], set[tuple[object, ...]]]


def _laid_out(values: tuple[Any, ...]) -> Iterator[object]:
    """Of matrices the dtype, the sides with their strides, and the place; and numbers."""
    for x in values:
        if isinstance(x, VirtualTensor) and x.numel() > 1:
            sides = [side for side in zip(x.shape, x.stride(), strict=True) if side[0] > 1]
            yield x.dtype, sides, x.data_ptr() % 16
        elif isinstance(x, float):
            yield x


def sums_of(config: MuonConfig, patch: pytest.MonkeyPatch) -> list[Sums]:
    """For each layout, the operations with sums of the matrices of each shape."""
    found: Sums = defaultdict(set)
    called: list[object] = []
    run, staged = Gpu.run, megatron_muon.runtime.round.orthogonalize_staged

    def noted(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.split("::")[1]
        if name in SUMS:
            called.append((name, repr([*_laid_out((*args, *kwargs.values()))])))
        return run(gpu, func, args, kwargs)

    def of_matrix(*args: Any, rows: int, cols: int, **rest: Any) -> Any:
        called.clear()
        made = staged(*args, rows=rows, cols=cols, **rest)
        found[rows, cols].add(tuple(called))
        return made

    patch.setattr(Gpu, "run", noted)
    patch.setattr(megatron_muon.runtime.round, "orthogonalize_staged", of_matrix)
    layouts = []
    for tp, dp, round_bytes in LAYOUTS:
        config, found = replace(config, round_bytes=round_bytes), defaultdict(set)
        plan = small_plan(config, tp, dp, layers=1, hidden=512, ffn=2048)
        for rank in range(plan.size):
            record_step(plan, rank, config)
        layouts.append(found)
    return layouts


KINDS = [
    {"ns_iteration": "gram", "ns_dtype": "fp16"},
    {"ns_iteration": "standard", "ns_dtype": "bf16", "elementwise": "foreach"},
    {"ns_iteration": "auto"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mode", ["one at a time", "deterministic"])
def test_each_sum_of_a_matrix_is_the_same_in_every_layout(
    mode: str,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """TP 1, 2 and 4, one round and a round for each parameter, and homes with other matrices."""
    config = MuonConfig(ns_batch=1, split_matrices="off", **kind)
    if mode == "deterministic":
        request.getfixturevalue(mode)
        config = layout_free(MuonConfig(**kind), is_deterministic=True)
    layouts = sums_of(config, monkeypatch)
    for found in layouts:
        assert {shape: len(ways) for shape, ways in found.items()} == dict.fromkeys(layouts[0], 1)
        assert found == layouts[0]
    assert any(rows >= 4 * cols for rows, cols in layouts[0])  # with room for all squares


def test_a_product_that_goes_by_the_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where squares lie once followed from what else was in the round."""
    fit, turn = gram._holds_all_squares, itertools.cycle((True, False))
    monkeypatch.setattr(gram, "_holds_all_squares", lambda x: fit(x) and next(turn))
    config = MuonConfig(ns_batch=1, split_matrices="off", ns_iteration="gram")
    layouts = sums_of(config, monkeypatch)
    assert any(found != layouts[0] for found in layouts)
