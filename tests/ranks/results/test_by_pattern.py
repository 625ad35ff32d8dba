"""Settings by pattern: a matrix that matches has what it would have if the whole run had
the setting, any other what it has without; wherever it is cut, and on any topology.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from support.expected.oracle import qkv_rows
from support.models.gpt import (
    Case,
    Topology,
    check,
    error_of_start,
    on_ranks,
    trained,
    truth,
)
from support.runs.topologies import (
    DP2,
    DP2_EP2,
    DP3,
    ONE,
    PP2,
    PP2_DP2,
    TP2,
    TP2_DP2,
    TP2_DP2_OVERLAP,
)

CASE = Case(bf16=False).with_muon(ns_dtype="fp32")
FC1 = "*.linear_fc1.weight"
FC2 = "*.linear_fc2.weight"
PROJ = "decoder.layers.0.self_attention.linear_proj.weight"
# In the order of a table: of each setting the last pattern that matches counts.
TABLE: dict[str, dict[str, Any]] = {
    FC1: {"ns_steps": 8, "momentum": 0.8, "lr": 0.004},
    FC2: {"rms": 0.4, "scale_mode": "shape_scaling", "weight_decay": 0.3},
    "*.layers.1.*": {"ns_coefficients": "quintic"},
    "*.layers.1.mlp.*": {"momentum": 0.9},
    "*.1.self_attention.*": {"rms": 0.3, "scale_mode": "update_norm"},
    PROJ: {"lr": 0.001, "min_lr": 0.0, "weight_decay": 0.0},
    "embedding.*": {"lr": 0.05},
}
OF_RUN = {"rms": "matched_adamw_rms"}
OF_CASE = ("lr", "weight_decay")


def with_table(case: Case, table: dict[str, dict[str, Any]]) -> Case:
    texts = []
    for pattern, settings in table.items():
        texts.append(f"{pattern}:" + ",".join(f"{k}={v}" for k, v in settings.items()))
    return case.with_muon(by_pattern=tuple(texts))


def of_whole_run(case: Case, settings: dict[str, Any]) -> Case:
    """The case in which every parameter has these settings."""
    muon = {
        OF_RUN.get(key, key): value
        for key, value in settings.items()
        if key not in (*OF_CASE, "min_lr")
    }
    of_case = {key: settings[key] for key in OF_CASE if key in settings}
    return replace(case, **of_case).with_muon(**muon)


def settings_of(name: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, settings in table.items():
        if fnmatchcase(name, pattern):
            found |= settings
    return found


@cache
def _params(case: Case, topology: Topology) -> dict[str, Tensor]:
    return trained(case, topology)["params"]


def held_to_whole_runs(
    case: Case, table: dict[str, dict[str, Any]], topology: Topology = ONE
) -> None:
    made = _params(with_table(case, table), topology)
    plain = _params(case, topology)
    changed = set()
    for name, value in made.items():
        settings = settings_of(name, table)
        expected = _params(of_whole_run(case, settings), topology)[name]
        assert value.equal(expected), (name, settings)
        if not value.equal(plain[name]):
            changed.add(name)
    for pattern in table:
        assert any(fnmatchcase(name, pattern) for name in changed), pattern


FEW = {FC1: TABLE[FC1], "*.layers.1.*": {"ns_coefficients": "quintic", "momentum": 0.9}}
SPHERE = replace(CASE.with_muon(rule="hyperball"), weight_decay=0.0)
KINDS = {
    "muon": (CASE, TABLE),
    "hyperball": (SPHERE, FEW),
    "normuon": (CASE.with_muon(rule="normuon"), FEW),
    "block steps": (
        CASE.with_muon(full_period=2, block_lr_mult=0.5),
        {**FEW, FC2: {"rms": 0.4}},
        TP2,
    ),
    "namo": (CASE.with_muon(rule="namo"), FEW),
    "narrow momentum": (CASE.with_muon(momentum_dtype="int8"), FEW),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_matrix_has_the_settings_of_its_patterns_and_no_other(name: str) -> None:
    held_to_whole_runs(*KINDS[name])


@pytest.mark.parametrize("topology", [TP2_DP2_OVERLAP, PP2_DP2, DP3])
def test_every_topology_has_the_bits_of_one_process(topology: Topology) -> None:
    check(with_table(CASE, TABLE), topology)


EXPERT = "*.experts.local_experts.{}.linear_fc1.weight"
EXPERTS = {
    "*.experts.*": {"lr": 0.004},
    EXPERT.format(3): {"ns_steps": 8, "lr": 0.001},
    EXPERT.format(1): {"momentum": 0.8},
}


def test_experts_are_numbered_over_all_ranks() -> None:
    """As ``routes`` prints them, also in the rates of their groups."""
    case = replace(CASE, moe=True)
    held_to_whole_runs(case, EXPERTS)
    check(with_table(case, EXPERTS), DP2_EP2)


@pytest.mark.parametrize("topology", [ONE, TP2_DP2])
def test_a_part_of_a_fused_weight_has_settings_of_its_own(topology: Topology) -> None:
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    table = {f"{qkv}[v]": {"ns_steps": 8, "momentum": 0.8}}
    own = trained(with_table(CASE, table), topology)["params"][qkv]
    plain = truth(CASE)["params"][qkv]
    every = truth(of_whole_run(CASE, table[f"{qkv}[v]"]))["params"][qkv]
    _, _, rows = qkv_rows(CASE.heads, CASE.groups, CASE.head_size)
    others = sorted({*range(own.size(0))} - {*rows})
    assert own[rows].equal(every[rows]) and not own[rows].equal(plain[rows])
    assert own[others].equal(plain[others])


STEPS = {
    FC1: {"ns_steps": 8},
    "*.layers.1.mlp.*": {"ns_coefficients": "quintic"},
    "*.layers.0.mlp.linear_fc2.*": {"rms": 0.3, "scale_mode": "update_norm"},
}


@pytest.mark.parametrize("iteration", ["standard", "auto"])
def test_matrices_that_homes_share_have_steps_of_their_own(iteration: str) -> None:
    """To the rounding of another order of sums: each strip adds its own."""
    case = with_table(CASE.with_muon(ns_iteration=iteration), STEPS)
    alone = truth(case)["params"]
    shared = case.with_muon(split_matrices=2, homes="local")
    for name, value in trained(shared, DP2)["params"].items():
        torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)


NAMES = "matches no parameter of"
ERRORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing": ("nothing*:lr=0.1", {}, NAMES),
    "no matrix": ("embedding.*:lr=0.1,ns_steps=6", {}, NAMES),
    "no such expert": (f"{EXPERT.format(9)}:lr=0.1", {}, NAMES),
    "no such part": (f"{FC1}[gate]:ns_steps=6", {}, NAMES),
    "rate of a part": (
        "*.linear_qkv.weight[q]:lr=0.1",
        {},
        "lr=0.1 is of whole parameters",
    ),
    "radius of AdamW's": (
        "",
        {"rule": "hyperball", "radii": (("embedding.*", 3.0),)},
        "in radii (--muon-radius) matches no parameter of",
    ),
    "factor": (
        f"{PROJ}:min_lr=0.1",
        {"lr_mults": ((PROJ, 1.0),)},
        "min_lr=0.1 by by_pattern (--muon-for) and a factor by lr_mults",
    ),
    "factor of decay": (
        f"{PROJ}:weight_decay=0.1",
        {"wd_mults": ((PROJ, 2.0),)},
        "weight_decay=0.1 by by_pattern (--muon-for) and a factor by wd_mults",
    ),
    "minimum above the run's rate": (
        f"{PROJ}:min_lr=5.0",
        {},
        "min_lr=5.0: the minimum, 5.0, is above the rate",
    ),
    "two patterns together": (
        f"{PROJ}:ns_coefficients=deepseekv4 *.linear_proj.*:ns_steps=6",
        {},
        f"{PROJ}: ns_coefficients",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_model_cannot_have_is_an_error_on_all_ranks(name: str) -> None:
    texts, more, said = ERRORS[name]
    by_pattern = tuple(texts.split())
    case = replace(CASE, moe=True).with_muon(by_pattern=by_pattern, **more)
    texts = on_ranks(error_of_start, case, PP2)
    assert any(said in text for text in texts), texts
    assert all("Error: " in text for text in texts), texts
