"""Megatron's gradient norm in a Muon run is that of one process, whatever is marked on weights.

With Transformer Engine's Python on the path over its own modules, else over their stand-ins.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from unittest import mock

import pytest

from megatron_muon.mcore import build
from support import te_on_cpu
from support.installed import VERSION, lacks
from support.models.gpt import Case, Topology, start, take_step
from support.ranks import run

GROUPED = Case(steps=1, moe=True, grouped="te", gated=True)
MLA = Case(steps=1, mla="duplicated")
SP = {"sequence_parallel": True}
ETP1 = Topology(tp=2, ep=2, etp=1, **SP)
ETP2 = Topology(tp=2, dp=2, ep=2, **SP)

NormAndText = tuple[float, str]


def _norm(case: Case, topology: Topology, corrected: bool) -> NormAndText:
    """The norm of a step's gradients, and what is printed at the start."""
    said = io.StringIO()
    kept = contextlib.nullcontext() if corrected else mock.patch.object(build, "count_once", _none)
    with kept, contextlib.redirect_stdout(said):
        built = start(case, topology)
    take_step(built, 0)
    return float(built.log["norms"][0]), said.getvalue()


def _none(parts: object, stage: object) -> list[str]:
    return []


def _norms(case: Case, topology: Topology, corrected: bool = True) -> NormAndText:
    lacking = lacks(case, topology)
    if lacking:
        pytest.skip(lacking)
    by_rank = run(_norm, topology.world_size, case, topology, corrected)
    assert len({norm for norm, _ in by_rank}) == 1
    return by_rank[0]


def _is_wrong(case: Case, topology: Topology) -> bool:
    """In Megatron: MLA's duplicates before core 0.17, experts without marks before 0.19."""
    te = te_on_cpu.TE
    marks_experts = te is None or te < (2, 13) or VERSION >= (0, 19)
    marks_duplicates = VERSION < (0, 17) if te is not None else True  # and always the stand-in
    if VERSION < (0, 13) and te is not None:
        marks_duplicates = False  # they are cut there
    mla = case.mla == "duplicated" and marks_duplicates
    return topology.tp > 1 and (mla or (case.grouped == "te" and not marks_experts))


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        pytest.param(GROUPED, ETP1, id="grouped-etp1"),
        pytest.param(GROUPED, ETP2, id="grouped-etp2"),
        pytest.param(GROUPED, Topology(dp=2, ep=2), id="grouped-tp1"),
        pytest.param(replace(GROUPED, grouped=""), ETP2, id="sequential"),
        pytest.param(MLA, Topology(2, 1, 2, **SP), id="mla"),
        pytest.param(Case(steps=1), Topology(2, 2, 1, **SP), id="dense"),
    ],
)
def test_the_norm_is_that_of_one_process(case: Case, topology: Topology) -> None:
    one, _ = _norms(case, Topology())
    here, said = _norms(case, topology)
    assert here == pytest.approx(one, rel=1e-5)
    of_megatron, _ = _norms(case, topology, corrected=False)
    wrong = _is_wrong(case, topology)
    assert (of_megatron == pytest.approx(one, rel=1e-5)) is not wrong
    assert ("Megatron's gradient norm would count" in said) is wrong
    if wrong:
        name = "linear_fc1.weight*" if case.grouped else "linear_kv_down_proj.weight"
        assert f"layers.*.mlp.experts.{name}" in said or f"self_attention.{name}" in said
