"""Rules other than Muon's in every way that a run may cut, hold or send its matrices.

``test_oracle`` holds them to their papers' formulas; here one process is what others
equal.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.mcore.checkpoint.buffers import RECORD
from megatron_muon.mcore.checkpoint.chain import WHOLE_WEIGHTS
from megatron_muon.rules.fused import trial
from megatron_muon.rules.muon import Foreach
from ranks.errors.test_half_done import check_half_step
from ranks.results.test_nonfinite import FC1, _planted
from support.checkpoints.saving import formats, load, save
from support.models.gpt import (
    Case,
    Topology,
    on_ranks,
    start,
    stepped,
    take_step,
    trained,
)
from support.ranks import error_of, run
from support.runs.cases import lr_at, muon_weights
from support.runs.own_rules import HERE
from support.runs.topologies import (
    DP2,
    DP2_EP2,
    DP3,
    DP3_OVERLAP,
    DP4_INSTANCES2,
    ONE,
    PP2,
    PP2_DP2_EP2,
    TP2,
    TP2_DP2,
    TP2_DP2_EP2_ETP1,
    TP2_DP3,
    TP2_PP2_DP2,
)
from support.runs.watching import having, logged, promised

CASE = Case(bf16=False, weight_decay=0.0).with_muon(rule="hyperball", ns_dtype="fp32")
OWN = f"{HERE}:polar_express"  # one of a user's own
RULES = ("hyperball", "normuon", "namo", OWN)
MOE = replace(CASE, moe=True)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
# An element's error is that of a norm: a sum of at most 1e5 squares in fp32, by slice
# and then over slices, in three steps; Newton-Schulz of another batch rounds otherwise.
TOLERANCE = 1e-5


COLUMNS = CASE.with_muon(splits=(("*.linear_proj.*", "cols:48,48"),))
GIVEN = CASE.with_muon(radii=(("*.linear_*", 7.0), ("*.linear_fc1.*", 3.0)))
CASES = {
    "tp": (CASE, TP2_DP2),
    "cut by shards": (CASE, DP3_OVERLAP),
    "pipeline": (CASE, TP2_PP2_DP2),
    "instances": (CASE, DP4_INSTANCES2),
    "rounds": (CASE.with_muon(round_bytes=1), TP2_DP2),
    "replicas": (replace(CASE, mla="duplicated"), TP2_DP2),
    "shared": (CASE.with_muon(split_matrices=2), DP2),
    "shared over tp": (CASE.with_muon(split_matrices=4), TP2_DP3),
    "columns that are units": (COLUMNS, TP2_DP3),
    "heads": (CASE.with_muon(splits=((QKV, "heads"),)), TP2),
    "experts": (MOE, DP2_EP2),
    "experts over tp": (MOE, TP2_DP2_EP2_ETP1),
}


PAIRS = [
    (name, rule)
    for name in CASES
    for rule in RULES
    if not (rule == OWN and name.startswith("shared"))  # it gets whole matrices
]


@pytest.mark.parametrize("name, rule", PAIRS)
def test_it_is_that_of_one_process(name: str, rule: str) -> None:
    case, topology = CASES[name]
    _equals_one_process(case.with_muon(rule=rule), topology)


def test_given_radii_are_those_of_one_process() -> None:
    _equals_one_process(GIVEN, TP2_DP2)


def _equals_one_process(case: Case, topology: Topology) -> None:
    expected = trained(case.with_muon(split_matrices=None), ONE)
    found = trained(case, topology)
    for kind in ("main", "exp_avg"):
        for param, value in expected[kind].items():
            torch.testing.assert_close(
                found[kind][param], value, rtol=TOLERANCE, atol=TOLERANCE
            )


@pytest.mark.parametrize("name", ["tp", "experts", "columns that are units"])
def test_every_norm_stays(name: str) -> None:
    """Of whole weights whose matrices all keep theirs."""
    case, topology = CASES[name]
    before = trained(replace(case, steps=0), topology)["main"]
    after = trained(case, topology)["main"]
    for param in muon_weights(case):
        assert not torch.equal(after[param], before[param])
        # of the three steps' rounding of norms, each 2^-24 times the root of the number
        torch.testing.assert_close(
            after[param].double().norm(),
            before[param].double().norm(),
            rtol=1e-6,
            atol=0,
        )


@pytest.mark.parametrize("rule", ["normuon", "namo"])
def test_an_update_has_the_root_mean_square_that_is_promised(rule: str) -> None:
    """Of a first step, in which NAMO's factor is 1, whose directions are as orthogonal
    as five steps of Newton-Schulz make them.
    """
    case = replace(CASE.with_muon(rule=rule), steps=1)
    before = trained(replace(case, steps=0), TP2_DP2)["main"]
    after = trained(case, TP2_DP2)["main"]
    for name in muon_weights(case):
        update = (after[name] - before[name]).double() / lr_at(case, 0, name)
        root_mean = float(update.square().mean().sqrt())
        # of fp32 weights and their differences
        assert root_mean == pytest.approx(0.2, rel=0.2 if rule == "namo" else 1e-4)


def test_a_given_radius_is_the_norm_after_a_step() -> None:
    after = trained(GIVEN, DP2)["main"]
    for param in muon_weights(GIVEN):
        units = 3 if "linear_qkv" in param else 1
        radius = 3.0 if "linear_fc1" in param else 7.0
        norm = float(after[param].double().norm())
        assert norm == pytest.approx(radius * math.sqrt(units), rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_momentum_in_fewer_bytes(rule: str) -> None:
    """On one rank, where blocks are not cut; the weights are not those of fp32."""
    case = CASE.with_muon(rule=rule, momentum_dtype="int8")
    after = trained(case, ONE)["main"]
    plain = trained(CASE.with_muon(rule=rule), ONE)["main"]
    for param in muon_weights(case):
        assert not torch.equal(after[param], plain[param])
        norm = float(plain[param].norm())
        off = 1e-6 if rule == "hyperball" else 1e-2  # whose norms do not stay
        assert float(after[param].norm()) == pytest.approx(norm, rel=off)


@pytest.mark.slow
@pytest.mark.parametrize("name, rule", PAIRS)
def test_a_momentum_in_fewer_bytes_over_every_topology(name: str, rule: str) -> None:
    """Shards cut its blocks; Newton-Schulz gets it before, so the first step is that of
    fp32.
    """
    plain, topology = CASES[name]
    case = plain.with_muon(rule=rule, momentum_dtype="int8")
    found = trained(replace(case, steps=1), topology)["main"]
    expected = trained(replace(plain.with_muon(rule=rule), steps=1), topology)["main"]
    for param, value in expected.items():
        assert torch.equal(found[param], value), param


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("topology", [ONE, TP2_DP2])
def test_a_gradient_that_is_not_finite_leaves_its_matrix(
    topology: Topology, rule: str
) -> None:
    case = CASE.with_muon(rule=rule)
    after = trained(case, topology, _planted(FC1, math.nan))["main"]
    before = trained(replace(case, steps=1), topology)["main"]
    plain = trained(case, topology)["main"]
    for name, value in after.items():
        assert torch.equal(value, (before if name == FC1 else plain)[name]), name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("column", [5, 90])
def test_a_matrix_with_units_of_columns_stays_as_a_whole(
    column: int, rule: str
) -> None:
    """However its shards are cut: the mark of a slice is its first element."""
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    planted = _planted(name, math.nan, (3, column))
    case = COLUMNS.with_muon(rule=rule)
    before = trained(replace(case, steps=1), DP3)["main"][name]
    for topology in (ONE, DP3):
        after = trained(case, topology, planted)["main"][name]
        torch.testing.assert_close(after, before, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["normuon", "namo"])
def test_a_load_heals_half_a_step(rule: str, tmp_path: Path) -> None:
    case = CASE.with_muon(rule=rule, round_bytes=1)
    check_half_step(case, TP2, "momentum", formats()[-1], tmp_path)


def _dtypes(rule: str) -> list[set[torch.dtype]]:
    """Of directions: in a step, and in the trial of kernels before the first one."""
    built = start(Case(layers=1, weight_decay=0.0).with_muon(rule=rule), ONE)
    numerics = built.optimizer.chained_optimizers[0].muon.numerics
    found: list[set[torch.dtype]] = []
    for act in (
        lambda: take_step(built, 0),
        lambda: trial(Foreach(), torch.device("cpu"), numerics),
    ):
        with (
            mock.patch.object(Foreach, "apply_updates", autospec=True) as updates,
            mock.patch.object(Foreach, "blend", autospec=True) as blends,
        ):
            act()
        calls = updates.call_args_list + blends.call_args_list
        found.append({one.dtype for call in calls for one in call.args[2]})
    return found


@pytest.mark.parametrize("rule", RULES)
def test_the_kernels_of_its_directions_are_tried_before_a_step(rule: str) -> None:
    ((in_step, tried),) = run(_dtypes, 1, rule)
    assert in_step and in_step <= tried


def _loads_in_between() -> list[float]:
    """A run of two steps with a load after the first; only the first stage trains."""
    case = replace(CASE, frozen=("decoder.layers.1.*", "decoder.final*", "output*"))
    built = stepped(case, PP2, 1)
    built.optimizer.load_state_dict(built.optimizer.state_dict())
    take_step(built, 1)
    return list(built.log["norms"])


def test_a_load_within_a_run_where_a_stage_is_frozen() -> None:
    one, other = run(_loads_in_between, 2, timeout=60.0)
    assert one == other


def _saves_doubled(*of_run: Any) -> dict[str, float]:
    """Radii that no norm equals, as a run has saved them."""
    case, topology, format, folder = of_run
    built = stepped(case, topology, 1)
    radii = built.optimizer.radii
    radii.known = {name: 2 * radius for name, radius in radii.known.items()}
    save(built, folder, format)
    return dict(radii.known)


def _loads(*of_run: Any) -> dict[str, float]:
    case, topology, format, folder = of_run
    built = start(case, topology)
    load(built, folder, format)
    take_step(built, 1)
    return dict(built.optimizer.radii.known)


@pytest.mark.parametrize(
    "case, format, at_load",
    [
        (COLUMNS, WHOLE_WEIGHTS, TP2),
        (MOE, WHOLE_WEIGHTS, PP2_DP2_EP2),
        (COLUMNS, "torch", ONE),
    ],
)
def test_radii_are_those_of_the_checkpoint(
    case: Case, format: str, at_load: Topology, tmp_path: Path
) -> None:
    (saved,) = on_ranks(_saves_doubled, case, ONE, format, tmp_path)
    for loaded in on_ranks(_loads, case, at_load, format, tmp_path):
        assert loaded == saved


def _refuses(saved: Any) -> str:
    built = stepped(CASE, DP2, 1)
    state = built.optimizer.state_dict()
    known = state[RECORD]["radii"]
    state[RECORD] = {**state[RECORD], "radii": saved}
    text = error_of(lambda: built.optimizer.load_state_dict(state))
    take_step(built, 1)  # nothing was loaded
    assert built.optimizer.radii.known == known
    return text


@pytest.mark.parametrize(
    "saved", [[1.0], {"a": "1"}, {1: 1.0}, {"a": True}, {"a": math.inf}, {"a": 1e39}]
)
def test_radii_that_are_none_are_refused_before_anything_is_loaded(saved: Any) -> None:
    for text in run(_refuses, 2, saved):
        assert (
            "the checkpoint's radii of the rule hyperball are not numbers from" in text
        )


def test_numbers_have_updates_of_the_radii() -> None:
    """W's RMS, times 0.75 to 0.95 or so of an orthogonal direction's."""
    assert promised(CASE, TP2_DP2) == {}
    for rows in logged(CASE, TP2_DP2)[1]:
        for numbers in having(rows, "momentum_norm").values():
            assert 0.5 < numbers["update_rms"] / numbers["weight_rms"] < 1.25


@pytest.mark.parametrize("rule", ["normuon", "namo"])
def test_numbers_have_updates_where_they_are_the_directions(rule: str) -> None:
    case = replace(CASE.with_muon(rule=rule), steps=2)
    steps = [having(rows, "momentum_norm") for rows in logged(case, ONE)[1]]
    assert bool(promised(case, ONE)) == (rule == "normuon")
    for numbers in (row for rows in steps for row in rows.values()):
        if rule == "normuon":
            assert numbers["update_rms"] == pytest.approx(0.2, rel=1e-4)
            assert numbers["cosine"] > 0
        else:
            assert numbers.keys().isdisjoint({"update_rms", "cosine"})


def _error(case: Case, topology: Topology) -> str:
    built = start(case, topology)
    if case.seed == 0:
        for name, weight in built.ddp.module.named_parameters():
            if name.endswith("layers.1.mlp.linear_fc1.weight"):
                weight.data.zero_()
        built.optimizer.reload_model_params()
    before = [param.clone() for param in built.ddp.parameters()]
    text = error_of(lambda: take_step(built, 0))
    for param, old in zip(built.ddp.parameters(), before, strict=True):
        assert torch.equal(param, old), text
    return text


@pytest.mark.parametrize(
    "case, text",
    [
        (
            replace(CASE, weight_decay=0.1),
            r"a group of them has weight_decay 0.1: give --weight-decay 0, or",
        ),
        (
            replace(CASE, seed=0),
            r"layers.1.mlp.linear_fc1.weight: the norm is not from 1e-15 to 1e+15",
        ),
    ],
)
def test_what_it_cannot_keep_is_refused_on_all_ranks_before_anything_changes(
    case: Case, text: str
) -> None:
    for found in on_ranks(_error, case, TP2):
        assert text in found
        assert "--muon-" in found  # the way out
