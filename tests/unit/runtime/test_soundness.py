"""A direction that is not finite leaves its matrix where it was, and its home knows of
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_muon import MuonConfig
from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.orthogonalize.newton_schulz import orthogonalize_staged
from megatron_muon.orthogonalize.normalization import Soundness
from megatron_muon.rules import muon
from megatron_muon.rules.muon import Foreach
from megatron_muon.runtime.states import of_halves, write_halves

BAD = (torch.nan, torch.inf, -torch.inf)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_marked_run_stays_and_others_do_not_notice(
    dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a long run is updated in several parts, and beside a matrix without
    decay.
    """
    monkeypatch.setattr(muon, "_IN_CACHE", 10)
    generator = torch.Generator().manual_seed(0)
    sizes, factors, decays = [3, 25, 7, 1], [0.1, 0.2, 0.3, 0.4], [0.0, 0.1, 0.1, 0.0]
    before = list(torch.randn(sum(sizes), generator=generator).split(sizes))
    directions = list(
        torch.randn(sum(sizes), generator=generator).to(dtype).split(sizes)
    )

    def updated(marked: tuple[int, ...]) -> list[Tensor]:
        params = [x.clone() for x in before]
        given = [x.clone() for x in directions]
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
@pytest.mark.parametrize(
    "rows, cols, blocks", [(6, 10, 1), (10, 6, 1), (8, 8, 1), (6, 8, 2)]
)
def test_a_home_knows_of_any_entry_that_is_not_finite(
    rows: int, cols: int, blocks: int, iteration: Any, dtype: Any, bad: float
) -> None:
    """By two numbers; of a matrix in column blocks, that are taken apart, any block
    counts.
    """
    config = MuonConfig(ns_dtype=dtype, ns_iteration=iteration)
    shape = {"rows": rows, "cols": cols, "column_blocks": blocks, "apart": blocks > 1}
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    plain = torch.randn(2 * rows * cols, generator=torch.Generator().manual_seed(0)).to(
        kind
    )
    for place in (0, rows * cols // 2 + 1, rows * cols - 1):
        staged = plain.clone()
        found = Soundness()
        staged[rows * cols + place] = bad
        moves = torch.tensor([True, True])
        orthogonalize_staged(
            staged, moves, numerics_on(staged.device, config), **shape, soundness=found
        )
        norms = torch.cat(found.norms)
        lines = torch.cat(found.lines)
        assert norms.isnan().tolist() == [False, True]
        assert lines.isfinite().tolist() == [True, False]
        assert staged[: rows * cols].isfinite().all()


def test_halves_are_exact_and_the_first_is_nearest_and_in_a_tie_away_from_zero() -> (
    None
):
    # every exponent
    upper = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = (upper | lower)[upper.view(torch.float32).isfinite()[:, 0]].view(-1)
    values = bits.view(torch.float32)
    high = torch.empty(len(bits), dtype=torch.bfloat16)
    remainder = torch.empty(len(bits), dtype=torch.int16)
    write_halves(values.clone(), high, remainder)
    assert torch.equal(of_halves(high, remainder).view(torch.int32), bits)
    is_tie = bits & 0xFFFF == 0x8000
    assert torch.equal(high[~is_tie], values[~is_tie].bfloat16())
    assert (high[is_tie].float().abs() > values[is_tie].abs()).all()
