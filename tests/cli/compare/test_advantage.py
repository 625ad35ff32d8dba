"""Where Muon's advantage in time ends, by the model and between measured rates."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from megatron_muon.lab.compare.advantage import (
    Advantage,
    Change,
    Timed,
    by_model,
    measured,
    modelled,
)
from megatron_muon.lab.compare.compared import Compared, OverLinks
from megatron_muon.lab.compare.figures import Figures
from megatron_muon.lab.compare.predicted import Predicted
from megatron_muon.lab.compare.report import slow_links
from megatron_muon.lab.compare.topology import Topology

ADAMW = Figures("adamw", 100.0, 10.0, 6_000_000, 0, 0, 12, 1, 2_000_000, (5.0, 4.0))
MUON = Figures("muon", 110.0, 20.0, 6_000_000, 3_000_000, 3_000_000, 8, 1, 3_000_000, (5.0, 3.0))
FREE = math.inf


def test_a_modelled_step_is_the_measured_one_and_its_bytes() -> None:
    """2.25 MB of a mean rank over 90 Mbit/s are 0.2 s."""
    assert modelled(ADAMW, MUON, 4, 90.0).muon_ms == pytest.approx(310.0)
    assert modelled(ADAMW, MUON, 4, FREE) == Timed(FREE, 100.0, 110.0)


def test_by_the_model_the_advantage_ends_where_both_need_the_same_time() -> None:
    (change,) = by_model(ADAMW, MUON, 4, 0.2).changes
    at = modelled(ADAMW, MUON, 4, change.mbits)
    assert at.muon_ms == pytest.approx(1.2 * at.adamw_ms) and change.ends
    below, above = (modelled(ADAMW, MUON, 4, factor * change.mbits) for factor in (0.9, 1.1))
    assert below.behind(0.2) > 0 > above.behind(0.2)


@pytest.mark.parametrize(
    ("lead", "exchange", "expected"),
    [
        (0.5, 3_000_000, Advantage(0.5, True, ())),  # the steps saved send as much
        (0.05, 3_000_000, Advantage(0.05, False, ())),  # the compute takes longer than is saved
        (0.5, 0, Advantage(0.5, True, ())),
    ],
)
def test_by_the_model_there_can_be_no_such_bandwidth(
    lead: float, exchange: int, expected: Advantage
) -> None:
    assert by_model(ADAMW, replace(MUON, exchange=exchange), 4, lead) == expected


def test_by_the_model_a_slow_link_can_begin_the_advantage() -> None:
    """Muon's step computes longer and sends no more: where bytes decide, fewer steps win."""
    advantage = by_model(ADAMW, replace(MUON, exchange=0), 4, 0.05)
    (change,) = advantage.changes
    assert not advantage.ahead and not change.ends
    at = modelled(ADAMW, replace(MUON, exchange=0), 4, change.mbits)
    assert at.muon_ms == pytest.approx(1.05 * at.adamw_ms)


def test_between_measured_rates_a_change_is_found_in_times_over_the_inverse_rate() -> None:
    """Steps of 10 + 100 / rate and 11 + 140 / rate: with a lead of 0.2 they meet at rate 20."""
    points = [Timed(rate, 10 + 100 / rate, 11 + 140 / rate) for rate in (5.0, 100.0, FREE, 10.0)]
    advantage = measured(points, 0.2)
    assert advantage.ahead and len(advantage.changes) == 1
    assert advantage.changes[0] == Change(pytest.approx(20.0), True, (10.0, 100.0))
    assert measured(points, 0.5) == Advantage(0.5, True, ())
    assert measured(points, 0.05) == Advantage(0.05, False, ())


def test_every_change_of_noisy_steps_is_named() -> None:
    points = [Timed(FREE, 10, 9), Timed(100.0, 10, 12), Timed(50.0, 10, 9)]
    first, second = measured(points, 0.0).changes
    assert first == Change(pytest.approx(300.0), True, (100.0, FREE))
    assert not second.ends and second.between == (50.0, 100.0)


def test_the_report_has_measured_rows_and_the_model_beside_them() -> None:
    slow = replace(ADAMW, step_ms=200.0), replace(MUON, step_ms=300.0)
    each = Compared(
        Topology(dp=4), ADAMW, MUON, Predicted(0, 0, 0, 0, 0, 0), (OverLinks(90.0, *slow),)
    )
    page = "\n".join(slow_links.as_markdown([each], None))
    assert "| dp4 | 90 | 200 | 233 | 2.00 | 300 | 310 | 3.00 | 1.50 | 1.33 |" in page
    assert "| dp4 | AdamW at every rate |" not in page
    written = json.loads(json.dumps(slow_links.as_json(each), allow_nan=False))
    assert written["steps"][0]["ratio"] == 1.5
    assert written["measured"][0]["lead"] == 0.1


def test_without_links_the_report_says_that_it_is_a_model() -> None:
    each = Compared(Topology(dp=4), ADAMW, MUON, Predicted(0, 0, 0, 0, 0, 0))
    page = "\n".join(slow_links.as_markdown([each], "there is no program tc"))
    assert "A model, not a measurement: there is no program tc." in page
    assert "Measured" not in page and slow_links.as_json(each)["measured"] is None
