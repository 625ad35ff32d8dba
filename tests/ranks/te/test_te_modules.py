"""GPTs of Transformer Engine's own modules: their marks by version, and bits of one
process.

Megatron's gradient norm and checkpoints go by these marks, and several are wrong:
weights that are duplicated over TP are marked as cut, an expert's second layer as cut
along the other dim. The stand-in does so, too. The modules' Python is real; see
``te_on_cpu``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from support import te_on_cpu
from support.installed import VERSION
from support.marks import needs_te
from support.models.gpt import Case, Topology, build, check, on_ranks, runs_of
from support.runs.topologies import (
    TP2,
    TP2_DP2_EP2,
    TP2_EP2_ETP1,
    TP2_SP,
)

pytestmark = needs_te

EXPERTS = TP2_DP2_EP2
MOE = Case(moe=True, grouped="te", mla="duplicated", gated=True)
CASES = (
    (MOE, EXPERTS),
    (MOE, TP2),
    (Case(moe=True, grouped="te"), TP2_EP2_ETP1),
    (Case(moe=True), EXPERTS),
    (Case(), TP2_SP),
)
KEYS = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
LAYER = "decoder.layers.0."
MARKS_GROUPED = te_on_cpu.TE is not None and te_on_cpu.TE < (2, 13)
# Megatron's own marks, whatever Transformer Engine's are
KNOWS_DUPLICATES = VERSION >= (0, 19)
CUTS_DOWN = VERSION < (0, 13)  # as column-parallel, and so marked


def _marks(case: Case, topology: Topology, standin: bool) -> dict[str, tuple[Any, ...]]:
    """By name: the shape, ``KEYS`` and ``sequence_parallel``, None where a mark is not
    there.
    """
    with mock.patch.object(te_on_cpu, "TE", None if standin else te_on_cpu.TE):
        params = build(case, topology).params
    return {
        name: (
            tuple(param.shape),
            *(getattr(param, key, None) for key in KEYS),
            bool(getattr(param, "sequence_parallel", False)),
        )
        for name, param in params.items()
        if name.startswith(LAYER)
    }


def _cut(marks: tuple[Any, ...]) -> tuple[Any, Any]:
    """Whether it is marked as cut, and where."""
    return marks[1:3]


@pytest.mark.parametrize("case, topology", CASES)
def test_marks_are_those_that_are_relied_on(case: Case, topology: Topology) -> None:
    for by_name in on_ranks(_marks, case, topology, False):
        for name, marks in by_name.items():
            leaf = name.removeprefix(LAYER)
            if "norm" in leaf or "router" in leaf:
                assert _cut(marks) == (None, None), name
            elif "_down_proj." in leaf:
                assert _cut(marks) == (not KNOWS_DUPLICATES, 0), name
            elif ".experts.local_experts." in leaf:
                assert _cut(marks) == (True, int("fc2" in leaf and KNOWS_DUPLICATES)), (
                    name
                )
            elif ".experts." in leaf:
                marked = KNOWS_DUPLICATES or MARKS_GROUPED
                dim = int("fc2" in leaf and KNOWS_DUPLICATES)
                assert _cut(marks) == ((True, dim) if marked else (None, None)), name
                assert marks[4] is (topology.ep == 1), f"{name}: allreduce"
            elif leaf.endswith(".weight"):
                dim = int(leaf.endswith(("linear_proj.weight", "linear_fc2.weight")))
                assert _cut(marks) == (True, dim), name


@pytest.mark.skipif(
    KNOWS_DUPLICATES or not MARKS_GROUPED or CUTS_DOWN,
    reason="the stand-in is of Transformer Engine up to 2.12 and cores 0.13 to 0.18",
)
@pytest.mark.parametrize("case, topology", CASES[:3])
def test_the_standin_is_marked_as_the_real_ones(case: Case, topology: Topology) -> None:
    real = on_ranks(_marks, case, topology, False)
    standin = on_ranks(_marks, case, topology, True)
    for true, made in zip(real, standin, strict=True):
        same = [
            n for n in made if ".experts." in n or (case.mla and "_down_proj." in n)
        ]
        assert same and {n: true[n] for n in same} == {n: made[n] for n in same}


MODES = ("column", "row", None)
STOOD_FOR = [
    *(("Linear", (32, 64), {"parallel_mode": mode, "bias": True}) for mode in MODES),
    *(
        ("GroupedLinear", (3, 32, 64), {"parallel_mode": mode, "bias": False})
        for mode in MODES
    ),
    ("LayerNormLinear", (32, 64), {"parallel_mode": "column", "bias": True}),
    (
        "LayerNormLinear",
        (32, 64),
        {"parallel_mode": "column", "normalization": "RMSNorm"},
    ),
    ("LayerNorm", (32,), {"sequence_parallel": True}),
    ("RMSNorm", (32,), {"sequence_parallel": True}),
]


@pytest.mark.parametrize("name, sizes, options", STOOD_FOR)
def test_the_dry_run_stands_in_with_the_same_parameters(
    name: str, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    import transformer_engine.pytorch as te

    from megatron_muon.lab.dry_run import stand_ins

    common: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    if "Linear" in name:
        common |= {
            "tp_size": 2,
            "sequence_parallel": options["parallel_mode"] is not None,
        }
    own, ours = (
        made(*sizes, **common, **options)
        for made in (
            getattr(te, name),
            stand_ins._KNOWN[f"transformer_engine.pytorch.{name}"],
        )
    )
    marked = name != "GroupedLinear" or MARKS_GROUPED

    def shown(module: Any) -> dict[str, tuple[Any, ...]]:
        return {
            key: (
                tuple(param.shape),
                param.dtype,
                marked and getattr(param, "tensor_model_parallel", False),
                marked and getattr(param, "partition_dim", -1),
                bool(getattr(param, "sequence_parallel", False)),
            )
            for key, param in module.named_parameters()
        }

    assert shown(own) == shown(ours)


BF16 = Case()
EXPERTED = replace(BF16, moe=True)
GROUPED = replace(EXPERTED, grouped="te")
MLA = replace(BF16, mla="duplicated")

RUNS = {
    "dense": (BF16, "tp2 pp2 dp2 overlap sp"),
    "gated": (replace(BF16, gated=True), "tp2 dp2"),
    "fp32": (replace(BF16, bf16=False), "dp3"),
    "vpp": (replace(BF16, layers=4), "pp2 dp2 overlap chunks2"),
    "grouped-gated": (replace(GROUPED, gated=True), "tp2 dp2 sp ep2"),
    "grouped": (GROUPED, "tp2 sp ep2 etp1, dp6 ep2"),
    "sequential": (EXPERTED, "tp2 dp2 sp ep2"),
    "mla": (MLA, "tp2 dp2 sp"),
    "mla-grouped": (replace(GROUPED, mla="duplicated", gated=True), "tp2 dp2 sp ep2"),
    "mtp": (replace(BF16, mtp=True), "tp2 pp2 dp2"),
    "dense-and-experts": (replace(GROUPED, dense_layers=1), "pp2 dp2 ep2"),
}


@pytest.mark.parametrize("case, topology", runs_of(RUNS))
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    check(case, topology)
