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
from support.checkpoints.saving import TORCH_DIST, save, spoil
from support.checkpoints.sealing import load
from support.models import megatrons_muon
from support.models.gpt import (
    Case,
    Topology,
    held,
    muon_weights,
    printed_by,
    start,
    take_step,
)
from support.models.megatrons_muon import MU
from support.ranks import RankError, run, run_on
from support.runs.whole import Whole, differences, whole

CASE = Case().with_muon(momentum=MU)
MOE = replace(CASE, moe=True)
one_of_its_own = pytest.mark.skipif(
    megatrons_muon.lacking() is not None, reason=str(megatrons_muon.lacking())
)


def _loaded(case: Case, topology: Topology, format: str, folder: str) -> dict[str, Any]:
    """What this rank holds after the load, and after one more step."""
    built = start(case, topology)
    spoil(built)
    with megatron_muon.reading_megatron_muon(built.optimizer, folder):
        _, printed = printed_by(lambda: load(built, folder, format))
    before = held(built)
    take_step(built, case.steps)
    groups = [
        group
        for part in built.optimizer.chained_optimizers
        for group in part.param_groups
    ]
    keys = {key for group in groups for key in group}
    return {
        "before": before,
        "after": held(built),
        "printed": printed.splitlines(),
        "keys": keys,
    }


def _parts(results: list[dict[str, Any]], when: str) -> Whole:
    return whole([result[when] for result in results])


LAYER_WISE = {
    "dp1-dp2": (CASE, Topology(), Topology(dp=2)),
    "dp2-dp1": (CASE, Topology(dp=2), Topology()),
    "dp2-tp2": (CASE, Topology(dp=2), Topology(tp=2)),
    "tp2-dp2": (CASE, Topology(tp=2), Topology(dp=2)),
    "moe": (MOE, Topology(dp=2, ep=2), Topology(dp=2)),
    "moe-ep": (MOE, Topology(dp=2), Topology(dp=2, ep=2)),
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
    args = (case, there, True, str(tmp_path))
    before = run(megatrons_muon.trained, there.world_size, *args)
    after = run_on(_loaded, case, here, TORCH_DIST[0], str(tmp_path))
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
    there = Topology(dp=2)
    here = Topology(tp=2)
    before = run(megatrons_muon.trained, 2, case, there, False, str(tmp_path))
    after = run(_loaded, 2, case, here, TORCH_DIST[0], str(tmp_path))
    _check(before, after, case)


@one_of_its_own
def test_an_fp32_models_is_not_read_rounded(tmp_path: Path) -> None:
    case = replace(CASE, bf16=False)
    run_on(megatrons_muon.trained, case, Topology(), False, str(tmp_path))
    with pytest.raises(
        RankError, match="is of an fp32 model, whose weights are its main param"
    ):
        run_on(_loaded, CASE, Topology(), TORCH_DIST[0], str(tmp_path))


# --- its layout without it ------------------------------------------------------------

IMITATED = {
    "dp1-dp2": (CASE, Topology(), Topology(dp=2)),
    "dp2-tp2": (CASE, Topology(dp=2), Topology(tp=2)),
    "moe-ep": (MOE, Topology(dp=2, ep=2), Topology(dp=2, ep=2)),
}


@pytest.mark.parametrize("shape", IMITATED)
@pytest.mark.parametrize("format", TORCH_DIST)
def test_the_layout_of_megatrons_muon_loads_with_any_format_of_the_run(
    format: str, shape: str, tmp_path: Path
) -> None:
    case, there, here = IMITATED[shape]
    before = run_on(megatrons_muon.imitated, case, there, str(tmp_path))
    after = run_on(_loaded, case, here, format, str(tmp_path))
    assert differences(whole(before), _parts(after, "before")) == []
    said = [line for line in after[0]["printed"] if "saved without a digest" in line]
    assert len(said) == 1


@pytest.mark.parametrize("rule", ["normuon", "namo"])
def test_a_rule_with_second_moments_loads_it(rule: str, tmp_path: Path) -> None:
    before = run_on(megatrons_muon.imitated, CASE, Topology(), str(tmp_path))
    case = CASE.with_muon(rule=rule)
    after = run_on(_loaded, case, Topology(), TORCH_DIST[0], str(tmp_path))
    assert differences(whole(before), _parts(after, "before")) == []


def test_another_momentum_coefficient_is_printed(tmp_path: Path) -> None:
    run_on(megatrons_muon.imitated, CASE, Topology(), str(tmp_path))
    other = replace(CASE, muon=())
    (after,) = run_on(_loaded, other, Topology(), TORCH_DIST[0], str(tmp_path))
    said = [line for line in after["printed"] if "checkpoint was saved with" in line]
    assert said == [
        "[megatron_muon] momentum (--muon-momentum) is 0.95 now; the checkpoint was "
        "saved with 0.9"
    ]


def test_a_weight_that_was_adamws_there_is_refused(tmp_path: Path) -> None:
    fc2 = "*.linear_fc2.weight"
    there = CASE.with_muon(muon_exclude=(fc2,))
    run_on(megatrons_muon.imitated, there, Topology(dp=2), str(tmp_path))
    error = r"has no momentum_buffer of decoder.*linear_fc2\.weight, only: exp_avg, exp_avg_sq"
    with pytest.raises(RankError, match=f"{error}.*muon_include"):
        run_on(_loaded, CASE, Topology(dp=2), TORCH_DIST[0], str(tmp_path))


def _read_own(case: Case, format: str, folder: str) -> None:
    built = start(case, Topology())
    save(built, folder, format)
    with megatron_muon.reading_megatron_muon(built.optimizer, folder):
        raise AssertionError("not reached")


def test_what_is_no_checkpoint_of_its_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match="is no checkpoint of Megatron's own Muon in torch_dist"
    ):
        run(_read_own, 1, CASE, TORCH_DIST[0], str(tmp_path))
