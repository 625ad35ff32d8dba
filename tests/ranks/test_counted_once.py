"""Megatron's gradient norm in a Muon run is that of one process, whatever is marked on
weights.

With Transformer Engine's Python on the path over its own modules, else over their
stand-ins.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import pytest

from megatron_muon.mcore.wiring import build
from support import te_on_cpu
from support.installed import VERSION
from support.models.gpt import Case, Topology, on_ranks, stepped
from support.runs.topologies import (
    DP2_EP2,
    ONE,
    TP2,
    TP2_DP2_EP2,
    TP2_DP2_SP,
    TP2_EP2_ETP1,
)

GROUPED = Case(steps=1, moe=True, grouped="te", gated=True)
MLA = Case(steps=1, mla="duplicated")
# Vectors alone have gradients: beside those of matrices a wrong count of them would not
# be seen.
SINKS = Case(steps=1, sinks=True, zero_grads=("*[!e]?",))  # all but softmax_offset
MIXER = Case(
    steps=1, mixer="mamba", groups=6, vocab=144, zero_grads=("*[!m].weight", "*[!t]")
)
SP = {"sequence_parallel": True}


def _norm(case: Case, topology: Topology, corrected: bool) -> float:
    """The norm of a step's gradients."""
    kept = (
        contextlib.nullcontext()
        if corrected
        else mock.patch.object(build, "count_once", _none)
    )
    with kept:
        built = stepped(case, topology, 1)
    return float(built.log["norms"][0])


def _none(parts: object, stage: object) -> None:
    pass


def _norms(case: Case, topology: Topology, corrected: bool = True) -> float:
    by_rank = on_ranks(_norm, case, topology, corrected)
    assert len(set(by_rank)) == 1
    return by_rank[0]


def _is_wrong(case: Case, topology: Topology) -> bool:
    """In Megatron: MLA's duplicates before core 0.17, experts without marks before
    0.19, softmax offsets on every core, a mixer's norm before 0.16.
    """
    te = te_on_cpu.TE
    marks_experts = te is None or te < (2, 13) or VERSION >= (0, 19)
    # and always the stand-in
    marks_duplicates = VERSION < (0, 17) if te is not None else True
    if VERSION < (0, 13) and te is not None:
        marks_duplicates = False  # they are cut there
    mla = case.mla == "duplicated" and marks_duplicates
    experts = case.grouped == "te" and not marks_experts
    vectors = case.sinks or (bool(case.mixer) and VERSION < (0, 16))
    return topology.tp > 1 and (mla or experts or vectors)


@pytest.mark.parametrize(
    "case, topology",
    [
        (GROUPED, TP2_EP2_ETP1),
        (GROUPED, TP2_DP2_EP2),
        (GROUPED, DP2_EP2),
        (replace(GROUPED, grouped=""), TP2_DP2_EP2),
        (MLA, TP2_DP2_SP),
        (Case(steps=1), Topology(2, 2, 1, **SP)),
        (SINKS, TP2),
        (MIXER, TP2),
    ],
)
def test_the_norm_is_that_of_one_process(case: Case, topology: Topology) -> None:
    one = _norms(case, ONE)
    here = _norms(case, topology)
    assert here == pytest.approx(one, rel=1e-5)
    of_megatron = _norms(case, topology, corrected=False)
    wrong = _is_wrong(case, topology)
    assert (of_megatron == pytest.approx(one, rel=1e-5)) is not wrong
