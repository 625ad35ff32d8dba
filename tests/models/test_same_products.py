"""Where bits are promised, a GPU computes a matrix by the same sums in every layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import gram, newton_schulz
from megatron_muon.orthogonalize.numerics import layout_free
from support.virtual_gpu.plans import small_plan
from support.virtual_gpu.step import record_step
from support.virtual_gpu.trace import Kernel, Range

LAYOUTS = ((1, 2), (2, 2), (4, 1), (1, 3))  # TP, DP
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
ENTERS = {"divide", "div"}  # a matrix divided by its norm
PROMISED = {"ns_batch": 1, "split_matrices": "off"}


def _bytes(ranges: list[Range]) -> tuple[int, ...]:
    return tuple(stop - start for _, start, stop in ranges)


def products_of(config: MuonConfig) -> list[set[tuple[object, ...]]]:
    """For each layout, the different lists of products of a matrix.

    Those of (m, n, k) read and write mk, kn and mn elements.
    """
    layouts = []
    for tp, dp in LAYOUTS:
        plan = small_plan(config, tp, dp, layers=1, hidden=512, ffn=2048)
        of_matrices: list[list[object]] = []
        for event in itertools.chain(
            *(record_step(plan, r, config).step for r in range(tp * dp))
        ):
            if isinstance(event, Kernel) and event.name in ENTERS:
                of_matrices.append([_bytes(event.writes)])
            elif isinstance(event, Kernel) and event.name in PRODUCTS:
                sizes = _bytes(event.reads), _bytes(event.writes)
                of_matrices[-1].append((event.name, *sizes))
        layouts.append(set(map(tuple, of_matrices)))
    return layouts


@pytest.mark.parametrize(
    "kind",
    [
        {"ns_iteration": "gram", "ns_dtype": "fp16", "round_bytes": 1},
        {"ns_iteration": "standard", "ns_dtype": "bf16", "elementwise": "foreach"},
        {"ns_iteration": "auto"},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["one at a time", "deterministic"])
def test_each_sum_of_a_matrix_is_the_same_in_every_layout(
    mode: str,
    kind: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Products, and the norm, which is of rows that lie one after another."""
    config = MuonConfig(**PROMISED, **kind)
    if mode == "deterministic":
        request.getfixturevalue(mode)
        config = layout_free(MuonConfig(**kind), is_deterministic=True)
    enter = newton_schulz.enter

    def of_rows(x: Any, into: Any, source: Any, *rest: Any) -> Any:
        assert source.is_contiguous()
        return enter(x, into, source, *rest)

    monkeypatch.setattr(newton_schulz, "enter", of_rows)
    layouts = products_of(config)
    assert layouts == [layouts[0]] * len(LAYOUTS)
    assert len(layouts[0]) == 4  # one list for each shape; fc1 has room for all squares


def test_a_product_that_goes_by_the_layout_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where squares lie once followed from what else was in the round."""
    fit, turn = gram._holds_all_squares, itertools.cycle((True, False))
    monkeypatch.setattr(gram, "_holds_all_squares", lambda x: fit(x) and next(turn))
    layouts = products_of(MuonConfig(**PROMISED, ns_iteration="gram"))
    assert any(found != layouts[0] for found in layouts)
