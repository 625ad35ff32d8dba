"""A rule of one's own in Megatron, with what it may declare; what cannot run ends all
ranks. ``test_every_rule`` has one on every topology.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_muon import register_rule
from megatron_muon.mcore.checkpoint.buffers import RECORD
from ranks.errors.test_hangs import TIMEOUT, _short_timeout
from support.models.clipped import clipped
from support.models.gpt import (
    Case,
    Topology,
    build,
    error_of_building,
    error_of_optimizer,
    on_ranks,
    printed_by,
    start,
    stepped,
    take_step,
    trained,
)
from support.ranks import error_of, run
from support.runs import own_rules
from support.runs.cases import muon_weights
from support.runs.own_rules import HERE
from support.runs.topologies import DP2, DP2_EP2, ONE, TP2_DP2, TP2_DP2_OVERLAP
from support.runs.whole import whole


def _case(name: str, **changes: Any) -> Case:
    muon = (("rule", f"{HERE}:{name}"), ("ns_dtype", "fp32"), *changes.pop("muon", ()))
    return Case(bf16=False, muon=muon, **changes)


BATCHES = _case("polar_express")
HEADS = _case("polar", muon=(("splits", (("*.linear_qkv.*", "heads"),)),))
# Other batches round differently in fp32, by 2^-24. The slope of five polynomials at 0
# is 976, the product of their a's, and lr · scale is at most 0.065: 1.1e-5 in 3 steps.
TOLERANCE = 1.2e-5


def _assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for param, value in expected.items():
        torch.testing.assert_close(
            found[param], value, rtol=TOLERANCE, atol=TOLERANCE, msg=param
        )


@pytest.mark.parametrize(
    "case, topology",
    [
        (_case("reading"), TP2_DP2_OVERLAP),
        (HEADS, TP2_DP2),
        (_case("one_by_one", moe=True), DP2_EP2),
    ],
)
def test_it_is_that_of_one_process(case: Case, topology: Topology) -> None:
    expected = trained(case, ONE)
    found = trained(case, topology)
    for kind in ("main", "exp_avg"):
        _assert_close(found[kind], expected[kind])


def test_polar_express_of_ones_own_is_the_built_in_set() -> None:
    own = trained(BATCHES, TP2_DP2)["main"]
    muon = (("ns_coefficients", "polar_express"), ("ns_dtype", "fp32"))
    _assert_close(own, trained(Case(bf16=False, muon=muon), ONE)["main"])


def test_qk_clip_beside_it() -> None:
    """The clip of heads, by logits that the layout does not decide."""
    case = BATCHES.with_muon(qk_clip=100.0)
    alone = whole(on_ranks(clipped, case, ONE))["main"]
    _assert_close(whole(on_ranks(clipped, case, TP2_DP2))["main"], alone)
    unclipped = trained(BATCHES, ONE)["main"]
    qkv = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert not torch.equal(alone[qkv], unclipped[qkv])


@pytest.mark.parametrize(
    "name, text",
    [
        ("bad_shape", "on 2 matrices 32 x 48: ValueError: it takes"),
        ("fails_if_wide", "on 2 matrices 32 x 96: ValueError: too"),
        ("nothing", "cannot be imported: AttributeError"),
    ],
)
def test_what_cannot_run_is_refused_on_every_rank(name: str, text: str) -> None:
    settings = {"rule": f"{HERE}:{name}"}
    for found in on_ranks(error_of_building, Case(layers=1), DP2, settings):
        assert f"{HERE}:{name}" in found and text in found


def _with_another_rule() -> str:
    """Of the same name, on rank 1."""
    rules = own_rules.polar_express, torch.sign
    register_rule("of_this_rank", rules[dist.get_rank()])
    built = build(Case(layers=1), DP2)
    return error_of_optimizer(built, rule="of_this_rank")


def test_a_rule_with_another_result_on_a_rank_is_named_on_every_rank() -> None:
    for found in run(_with_another_rule, 2):
        assert "PlanMismatchError" in found
        assert "result of rule of_this_rank on a seeded matrix: rank 1 has" in found


def _loads_another_rules(folder: str) -> tuple[str, bool]:
    """What a load says of a rule's name that the checkpoint has."""
    built = start(Case(layers=1), DP2)
    state = built.optimizer.state_dict()
    settings = {**state[RECORD]["settings"], "rule": "leaves_a_trace:rule"}
    state[RECORD] = {**state[RECORD], "settings": settings}
    sys.path.insert(0, folder)
    _, printed = printed_by(lambda: built.optimizer.load_state_dict(state))
    return printed, "leaves_a_trace" in sys.modules


def test_a_name_from_a_checkpoint_is_compared_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "leaves_a_trace.py").write_text("rule = abs")
    (printed, first), (_, second) = run(_loads_another_rules, 2, str(tmp_path))
    assert "rule (--muon-rule) is 'muon' now; the checkpoint was saved with" in printed
    assert "'leaves_a_trace:rule'" in printed and not first and not second


def _raises_on_a_rank() -> str:
    with _short_timeout():
        built = stepped(replace(BATCHES, layers=1), TP2_DP2, 1)
    if dist.get_rank() != 1:
        return error_of(lambda: take_step(built, 1))
    broken = mock.Mock(side_effect=ZeroDivisionError("had enough"))
    part = built.part
    own = replace(part.muon.rule.rule, direction=broken)
    with mock.patch.object(part.muon.rule, "rule", own):
        return error_of(lambda: take_step(built, 1))


def test_an_exception_in_a_step_ends_all_ranks() -> None:
    texts = run(_raises_on_a_rank, 4, timeout=60.0, grace=TIMEOUT + 4)
    assert texts.pop(1).startswith("ZeroDivisionError: had enough")
    for text in texts:
        assert text.startswith("PhaseError: "), text


def test_every_matrix_has_gone_through_it() -> None:
    """Its scale is its own, so no update is Muon's."""
    own = trained(_case("polar"), DP2)["main"]
    muons = trained(Case(bf16=False).with_muon(ns_dtype="fp32"), ONE)["main"]
    for name, value in muons.items():
        assert torch.equal(own[name], value) is (name not in muon_weights(BATCHES))
