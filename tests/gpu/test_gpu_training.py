"""A small GPT learns with Muon: forward, backward, reduction and step on the device."""

from __future__ import annotations

from typing import get_args

import pytest

from megatron_muon.lab.accept.report import ROWS
from megatron_muon.lab.accept.results import Figure
from megatron_muon.settings.update import Preset
from support.gpu.model import on_ranks
from support.gpu.settings import Report, Settings
from support.gpu.training import faults, train, train_by_rules

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


@pytest.mark.parametrize("preset", get_args(Preset))
def test_a_small_gpt_learns(preset: Preset, settings: Settings, report: Report) -> None:
    ranks = on_ranks(settings, train, (settings, ROWS[preset], "muon"), 110.0)
    losses = ranks[0]
    report(text=f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps")
    assert faults(ranks) == ""


def test_it_learns_with_every_rule(settings: Settings, report: Report) -> None:
    ranks = on_ranks(settings, train_by_rules, settings, 170.0)
    for rule, losses in ranks[0].items():
        report(Figure(f"{rule}: loss after {len(losses)} steps", "", None, losses[-1]))
        assert faults([rank[rule] for rank in ranks]) == "", rule
