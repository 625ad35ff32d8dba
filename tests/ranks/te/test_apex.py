"""Over Apex's own FusedAdam: its Python is real, its kernel is the stub's; see ``apex_on_cpu``.

The switches between AdamW and Muon over it are those of ``test_switch.py``.
"""

from __future__ import annotations

import pytest

from support import apex_on_cpu, te_on_cpu
from support.models.gpt import Case, Topology, check, inner_optimizers, start
from support.models.torch_adam import ApexsLoop
from support.ranks import run

pytestmark = pytest.mark.skipif(
    te_on_cpu.TE is not None or not apex_on_cpu.installed(), reason="APEX_PATH names no Apex"
)


def _adam(optimizer: str) -> list[str]:
    (adam,) = inner_optimizers(start(Case(optimizer=optimizer), Topology()).optimizer)
    return [f"{cls.__module__}.{cls.__name__}" for cls in type(adam).__mro__]


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_megatron_takes_apexs(optimizer: str) -> None:
    (adam,) = run(_adam, 1, optimizer)
    assert "apex.optimizers.fused_adam.FusedAdam" in adam


def test_a_topology_equals_one_process() -> None:
    check(Case(steps=4), Topology(2, 1, 2))


def _masters(ours: bool) -> list[list[int]]:
    """How many entries the list of master weights has, group by group."""
    import torch
    from apex.optimizers import FusedAdam

    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    adam = (ApexsLoop if ours else FusedAdam)([{"params": params[:2]}, {"params": params[2:]}])
    adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    return [len(group["params"]) for group in adam.param_groups_master]


def test_the_stand_in_has_apexs_list_of_masters() -> None:
    """By whose length its step goes: a group that came later takes none."""
    assert run(_masters, 1, True) == run(_masters, 1, False) == [[2, 1]]
