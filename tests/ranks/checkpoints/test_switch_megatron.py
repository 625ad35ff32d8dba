"""Checkpoints of Megatron's own Muon, loaded into this package's: the momentum goes
on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_muon
from support.checkpoints.saving import formats, save, spoil
from support.checkpoints.sealing import load
from support.models import megatrons_muon
from support.models.gpt import (
    Case,
    Topology,
    held,
    muon_weights,
    on_ranks,
    printed_by,
    start,
    take_step,
)
from support.models.megatrons_muon import MU
from support.ranks import RankError, run
from support.runs.topologies import DP2, DP2_EP2, ONE, TP2
from support.runs.whole import Whole, differences, whole

CASE = Case().with_muon(momentum=MU)
MOE = replace(CASE, moe=True)
TORCH_DIST = [format for format in formats() if format != "torch"]
one_of_its_own = pytest.mark.skipif(
    megatrons_muon.lacking() is not None, reason=str(megatrons_muon.lacking())
)


def _loaded(
    case: Case, topology: Topology, format: str, folder: Path
) -> dict[str, Any]:
    """What this rank holds after the load, and after one more step."""
    built = start(case, topology)
    spoil(built)
    with megatron_muon.reading_megatron_muon(built.optimizer, folder):
        _, printed = printed_by(lambda: load(built, folder, format))
    before = held(built)
    take_step(built, case.steps)
    keys = set().union(*built.param_groups)
    return {
        "before": before,
        "after": held(built),
        "printed": printed.splitlines(),
        "keys": keys,
    }


def _parts(results: list[dict[str, Any]], when: str) -> Whole:
    return whole([result[when] for result in results])


LAYER_WISE = {
    "dp1-dp2": (CASE, ONE, DP2),
    "dp2-dp1": (CASE, DP2, ONE),
    "dp2-tp2": (CASE, DP2, TP2),
    "tp2-dp2": (CASE, TP2, DP2),
    "moe": (MOE, DP2_EP2, DP2),
    "moe-ep": (MOE, DP2, DP2_EP2),
}


def _check(
    before: list[dict[str, Any]], after: list[dict[str, Any]], case: Case
) -> None:
    """All state is bitwise the same after the load, and the next step is taken from
    there.

    Momentum and AdamW's weights are compared after one more step of both Muons, too.
    Muon's own weights cannot be: its coefficients are others there. fp32 sums of two or
    three terms in another order: a few units of 2^-24 of the largest term.
    """
    assert differences(_parts(before, "before"), _parts(after, "before")) == []
    theirs = _parts(before, "after")
    ours = _parts(after, "after")
    muons = muon_weights(case)
    assert ours["exp_avg"].keys() - ours["exp_avg_sq"].keys() == muons
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        for name, tensor in ours[kind].items():
            if kind == "main" and name in muons:
                assert not torch.equal(tensor, _parts(after, "before")["main"][name])
            else:
                largest = theirs[kind][name].abs().max()
                torch.testing.assert_close(
                    tensor, theirs[kind][name], rtol=1e-6, atol=float(largest) * 1e-6
                )


@one_of_its_own
@pytest.mark.parametrize("shape", LAYER_WISE)
def test_a_run_resumes_from_layer_wise_muon(shape: str, tmp_path: Path) -> None:
    case, there, here = LAYER_WISE[shape]
    args = (case, there, True, tmp_path)
    before = run(megatrons_muon.trained, there.world_size, *args)
    after = on_ranks(_loaded, case, here, TORCH_DIST[0], tmp_path)
    _check(before, after, case)
    assert [line for line in after[0]["printed"] if "saved with" in line] == []
    assert not after[0]["keys"] & {"momentum", "momentum_beta", "optimizer"}


@one_of_its_own
@pytest.mark.parametrize("bf16", [True, False])
def test_a_run_resumes_from_muon_with_all_state_on_every_rank(
    bf16: bool, tmp_path: Path
) -> None:
    """Upstream's ``--optimizer muon``: every rank has all state. (In fp32 the
    layer-wise one of 0.16 cannot save; there a main parameter is the weight itself.)
    """
    case = replace(CASE, bf16=bf16)
    before = on_ranks(megatrons_muon.trained, case, DP2, False, tmp_path)
    after = on_ranks(_loaded, case, TP2, TORCH_DIST[0], tmp_path)
    _check(before, after, case)


@one_of_its_own
def test_an_fp32_models_is_not_read_rounded(tmp_path: Path) -> None:
    case = replace(CASE, bf16=False)
    on_ranks(megatrons_muon.trained, case, ONE, False, tmp_path)
    with pytest.raises(
        RankError, match="is of an fp32 model, whose weights are its main param"
    ):
        on_ranks(_loaded, CASE, ONE, TORCH_DIST[0], tmp_path)


# --- its layout without it ------------------------------------------------------------

IMITATED = {
    "dp1-dp2": (CASE, ONE, DP2),
    "dp2-tp2": (CASE, DP2, TP2),
    "moe-ep": (MOE, DP2_EP2, DP2_EP2),
}


@pytest.mark.parametrize("shape", IMITATED)
@pytest.mark.parametrize("format", TORCH_DIST)
def test_the_layout_of_megatrons_muon_loads_with_any_format_of_the_run(
    format: str, shape: str, tmp_path: Path
) -> None:
    case, there, here = IMITATED[shape]
    before = on_ranks(megatrons_muon.imitated, case, there, tmp_path)
    after = on_ranks(_loaded, case, here, format, tmp_path)
    assert differences(whole(before), _parts(after, "before")) == []
    said = [line for line in after[0]["printed"] if "saved without a digest" in line]
    assert len(said) == 1


@pytest.mark.parametrize("rule", ["normuon", "namo"])
def test_a_rule_with_second_moments_loads_it(rule: str, tmp_path: Path) -> None:
    before = on_ranks(megatrons_muon.imitated, CASE, ONE, tmp_path)
    case = CASE.with_muon(rule=rule)
    after = on_ranks(_loaded, case, ONE, TORCH_DIST[0], tmp_path)
    assert differences(whole(before), _parts(after, "before")) == []


def test_another_momentum_coefficient_is_printed(tmp_path: Path) -> None:
    on_ranks(megatrons_muon.imitated, CASE, ONE, tmp_path)
    other = replace(CASE, muon=())
    (after,) = on_ranks(_loaded, other, ONE, TORCH_DIST[0], tmp_path)
    said = [line for line in after["printed"] if "checkpoint was saved with" in line]
    assert said == [
        "[megatron_muon] momentum (--muon-momentum) is 0.95 now; the checkpoint was "
        "saved with 0.9"
    ]


def test_a_weight_that_was_adamws_there_is_refused(tmp_path: Path) -> None:
    fc2 = "*.linear_fc2.weight"
    there = CASE.with_muon(muon_exclude=(fc2,))
    on_ranks(megatrons_muon.imitated, there, DP2, tmp_path)
    error = r"has no momentum_buffer of decoder.*linear_fc2\.weight, only: exp_avg, exp_avg_sq"
    with pytest.raises(RankError, match=f"{error}.*muon_include"):
        on_ranks(_loaded, CASE, DP2, TORCH_DIST[0], tmp_path)


def _read_own(case: Case, format: str, folder: Path) -> None:
    built = start(case, ONE)
    save(built, folder, format)
    with megatron_muon.reading_megatron_muon(built.optimizer, folder):
        raise AssertionError("not reached")


def test_what_is_no_checkpoint_of_its_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match="is no checkpoint of Megatron's own Muon in torch_dist"
    ):
        run(_read_own, 1, CASE, TORCH_DIST[0], tmp_path)
