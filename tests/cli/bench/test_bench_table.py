"""The figures of ``megatron-muon bench step`` over ranks and rounds."""

from __future__ import annotations

from megatron_muon.lab.bench.step.measure import Measured
from megatron_muon.lab.bench.step.meter import PARAM_GATHER, Times
from megatron_muon.lab.bench.step.table import Line, as_json, as_text


def _line(name: str, *steps: float, gather: float = 0.0) -> Line:
    parts = {"params-all-gather": gather}
    return Line(name, (Measured([Times(ms, parts | {"rest": ms - gather}, 0.0) for ms in steps]),))


def test_times_are_the_slowest_ranks() -> None:
    def one(*steps: float) -> Measured:
        parts = [{"muon-gather": ms / 4, "muon-scatter": ms / 4, "rest": ms / 2} for ms in steps]
        return Measured([Times(ms, part, 0.0) for ms, part in zip(steps, parts, strict=True)])

    line = Line("muon-contiguous", (one(1, 9, 2), one(4, 3, 8)))
    (row,) = as_json([line], {}, {})["rows"]
    assert row["step_ms"] == {"median": 8, "min": 4, "max": 9}
    assert row["exchange_ms"] == 4 and row["newton_schulz_ms"] == 0


def test_ratios_to_upstream_are_also_without_the_gather_of_parameters() -> None:
    lines = [
        _line("adamw", 2, 2, gather=1),
        _line("muon-contiguous", 4, 5, gather=2),
        _line("upstream-duplicated", 8, 8, gather=4),
    ]
    assert lines[1].steps_ms(PARAM_GATHER) == [2, 3]
    text = as_text(lines)
    ungathered = text[text.index("without the gather of parameters in either:") :]
    assert "to upstream-duplicated\n" in ungathered and "to adamw" not in ungathered
    assert "\nmuon-contiguous        0.62 (0.50-0.75)" in ungathered
    assert "without the gather" not in as_text(lines[:2])
