"""Over Apex's own FusedAdam: its Python is real, its kernel is the stub's; see
``apex_on_cpu``.

The switches between AdamW and Muon over it are those of ``test_switch.py``.
"""

from __future__ import annotations

import pytest

from support import apex_on_cpu, te_on_cpu
from support.models.gpt import Case, check, inner_optimizers, start
from support.ranks import run
from support.runs.topologies import ONE, TP2_DP2

pytestmark = pytest.mark.skipif(
    te_on_cpu.TE is not None or not apex_on_cpu.installed(),
    reason="APEX_PATH names no Apex",
)


def _adam(optimizer: str) -> list[str]:
    (adam,) = inner_optimizers(start(Case(optimizer=optimizer), ONE).optimizer)
    return [f"{cls.__module__}.{cls.__name__}" for cls in type(adam).__mro__]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_megatron_uses_apexs_adam(optimizer: str) -> None:
    (adam,) = run(_adam, 1, optimizer)
    assert "apex.optimizers.fused_adam.FusedAdam" in adam


def test_a_topology_equals_one_process() -> None:
    check(Case(), TP2_DP2)
