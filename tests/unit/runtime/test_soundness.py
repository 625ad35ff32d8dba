"""A direction that is not finite leaves its matrix where it was, and its home knows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize import newton_schulz
from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.orthogonalize.soundness import Soundness
from megatron_muon.runtime import update
from megatron_muon.runtime.nonfinite import Left, Nonfinite
from megatron_muon.runtime.update import Foreach

CPU = torch.device("cpu")
BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_marked_run_stays_and_others_do_not_notice(
    dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a long run is updated in several parts, and beside a matrix without decay."""
    monkeypatch.setattr(update, "ELEMENTS_AT_ONCE", 10)
    generator = torch.Generator().manual_seed(0)
    sizes, factors, decays = [3, 25, 7, 1], [0.1, 0.2, 0.3, 0.4], [0.0, 0.1, 0.1, 0.0]
    before = list(torch.randn(sum(sizes), generator=generator).split(sizes))
    directions = list(torch.randn(sum(sizes), generator=generator).to(dtype).split(sizes))

    def updated(marked: tuple[int, ...]) -> list[torch.Tensor]:
        params, given = [x.clone() for x in before], [x.clone() for x in directions]
        for run in marked:
            given[run][0] = bad
        Foreach().apply_updates(params, given, factors, decays)
        return params

    plain = updated(())
    for marked in ((1,), (0, 2), (0, 1, 2, 3)):
        for run, (made, kept) in enumerate(zip(updated(marked), before, strict=True)):
            assert torch.equal(made, kept if run in marked else plain[run])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("iteration", ["standard", "gram"])
@pytest.mark.parametrize(("rows", "cols", "blocks"), [(6, 10, 1), (10, 6, 1), (8, 8, 1), (6, 8, 2)])
def test_a_home_knows_of_any_entry_that_is_not_finite(
    rows: int, cols: int, blocks: int, iteration: Any, dtype: Any, bad: float
) -> None:
    """By two numbers; of a matrix in column blocks, that are taken apart, any block counts."""
    config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
    shape = {"rows": rows, "cols": cols, "column_blocks": blocks, "apart": blocks > 1}
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    plain = torch.randn(2 * rows * cols, generator=torch.Generator().manual_seed(0)).to(kind)
    for place in (0, rows * cols // 2 + 1, rows * cols - 1):
        staged, found = plain.clone(), Soundness()
        staged[rows * cols + place] = bad
        moves = torch.tensor([True, True])
        orthogonalize_staged(
            staged, moves, numerics_on(staged.device, config), **shape, soundness=found
        )
        norms, lines = torch.cat(found.norms), torch.cat(found.lines)
        assert norms.isnan().tolist() == [False, True]
        assert lines.isfinite().tolist() == [True, False]
        assert staged[: rows * cols].isfinite().all()


@pytest.mark.parametrize(("rows", "cols"), [(6, 10), (10, 6), (8, 8)])
def test_a_home_knows_of_a_square_that_overflows(
    rows: int, cols: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One entry of the last polynomial is infinite; the input is finite."""
    of_torch = newton_schulz.Products.times

    def times(self: Any, square: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        square[..., -1, 1] = torch.inf
        return of_torch(self, square, *rest, **more)

    monkeypatch.setattr(newton_schulz.Products, "times", times)
    found = Soundness()
    staged = torch.randn(rows * cols, generator=torch.Generator().manual_seed(0))
    config = MuonConfig(ns_dtype="fp32", ns_steps=1)
    moves = torch.tensor([True])
    orthogonalize_staged(
        staged, moves, numerics_on(staged.device, config), rows=rows, cols=cols, soundness=found
    )
    assert not found.lines[0].isfinite().any() and found.norms[0].isfinite().all()
    assert staged.isfinite().any()  # only some rows or columns of the short side are not


def test_steps_are_counted_by_matrix() -> None:
    counts = Nonfinite(["a", "b", "c"], CPU)
    assert counts.left(waits=False) == {}
    nan, fine = torch.tensor([torch.nan]), torch.tensor([-0.0])
    counts.add([([fine, fine], torch.cat([fine, nan])), ([nan], nan)])
    counts.add([([fine, fine], torch.cat([fine, fine])), ([nan], nan)])
    assert counts.left(waits=False) == {"b": Left(1, 0), "c": Left(2, 2)}
    assert Left(5, 3).since(Left(2, 2)) == Left(3, 1)
    Nonfinite([], CPU).add([])
