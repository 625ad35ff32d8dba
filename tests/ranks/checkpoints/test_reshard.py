"""Save at one topology, load at another: nothing is lost, and training goes on bit for
bit.

Whole main parameters, momenta, Adam's moments, the model's parameters and the steps of
the groups are compared element by element: after the load with those of the run that
saved, which are those of one process, and again two steps later. Both are bitwise,
since the gradients of a step are the same everywhere and the clip is off (see
test_topologies).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints.resharding import Held, loaded, refused, saved
from support.checkpoints.saving import RESHARDABLE, error_of_save, formats
from support.covering import CASES, DENSE, MOE, SMALLER, Change, covering_set, small_set
from support.installed import VERSION, lacks
from support.models.gpt import on_ranks, truth
from support.ranks import run
from support.runs.cases import Case, Topology
from support.runs.topologies import (
    DP2_EP2,
    DP2_OVERLAP,
    DP3_OVERLAP,
    DP4_EP4,
    ONE,
    PP2,
    PP2_DP3_OVERLAP,
    TP2,
    TP2_DP2,
    TP2_DP2_EP2,
    TP4,
)
from support.runs.whole import Whole, differences, whole

Runs = list[tuple[Held, Held]]
Saves = Callable[..., tuple[str, Runs]]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Each save once: its folder, and what its ranks hold then and two steps later."""

    @cache
    def of(
        case: Case, topology: Topology, format: str, *options: bool
    ) -> tuple[str, Runs]:
        folder = str(tmp_path_factory.mktemp("saved"))
        ranks = topology.world_size
        args = case, topology, format, folder, *options
        runs = run(saved, ranks, *args, timeout=_limit(ranks))
        for when, steps in enumerate((case.steps // 2, case.steps)):
            expected = truth(replace(case, steps=steps))
            assert differences(expected, _whole(runs, when)) == []
        return folder, runs

    return of


def _limit(ranks: int) -> float:
    return max(120.0, 30.0 * ranks)


def _whole(runs: Runs, when: int) -> Whole:
    return whole([held[when] for held in runs])


def check(
    saves: Saves,
    case: Case,
    format: str,
    at_save: Topology,
    at_load: Topology,
    options: tuple[bool, ...] = (),
    dirty: bool = False,
) -> tuple[Runs, Runs]:
    """What the two runs held; equal at the load and two steps later."""
    for topology in (at_save, at_load):
        if lacking := lacks(case, topology):
            pytest.skip(lacking)
    folder, before = saves(case, at_save, format, *options)
    parallel = bool(options and options[0])
    args = (case, at_load, format, folder, parallel, dirty)
    after = run(loaded, at_load.world_size, *args, timeout=_limit(at_load.world_size))
    for when, text in enumerate(("by loading", "two steps later")):
        assert differences(_whole(before, when), _whole(after, when)) == [], text
        for key in ("steps", "scalers"):
            values = [
                held[when][key] for held in (*before, *after) if held[when]["shards"]
            ]
            distinct = {repr(value[:1]) for value in values if value}
            assert len(distinct) <= 1, (text, key, values)
    assert differences(_whole(after, 0), _whole(after, 1))  # the steps did something
    return before, after


def _fast(change: Change) -> Any:
    marks = () if change in small_set() else (pytest.mark.slow,)
    return pytest.param(change, marks=marks, id=str(change))


@pytest.mark.parametrize("change", [_fast(change) for change in covering_set()])
def test_another_topology(change: Change, saves: Saves) -> None:
    dirty = covering_set().index(change) % 2 == 1
    check(
        saves,
        CASES[change.case],
        change.format,
        change.saved,
        change.loaded,
        dirty=dirty,
    )


# --- what else there is ---------------------------------------------------------------

TORCH_DIST = [format for format in formats() if format != "torch"]
FP16 = replace(
    DENSE,
    layers=2,
    bf16=False,
    fp16=True,
    steps=8,
    overflow=tuple((step, "*layers.0.mlp.linear_fc1.weight") for step in (1, 4)),
)


def test_fp16_and_its_loss_scale(saves: Saves) -> None:
    """The scale halves in steps 1 and 4 and doubles in between: before, at and after
    the load.
    """
    before, after = check(saves, FP16, RESHARDABLE, TP2_DP2, PP2_DP3_OVERLAP)
    scales = before[0][1]["log"]["loss_scales"]
    assert len(set(scales)) > 1 and all(
        h[1]["log"]["loss_scales"] == scales[4:] for h in after
    )


@pytest.mark.parametrize("at_load", [ONE, Topology.of("tp2 pp2 first_layers3")])
def test_stages_of_other_sizes(at_load: Topology, saves: Saves) -> None:
    """Stages of 1 and 3 layers: into one, and into stages of 3 and 1."""
    check(saves, DENSE, RESHARDABLE, Topology.of("pp2 first_layers1"), at_load)


def test_a_warm_up_of_the_momentum_goes_on(saves: Saves) -> None:
    """It ends after the load."""
    warming = replace(DENSE, layers=2).with_muon(momentum_warmup=DENSE.steps - 1)
    check(saves, warming, RESHARDABLE, TP2, DP3_OVERLAP)


CUT_GROUPS = replace(DENSE, layers=2, heads=8, groups=2)


@pytest.mark.parametrize("at_load", [ONE, TP2_DP2])
def test_query_groups_that_tp_has_cut(at_load: Topology, saves: Saves) -> None:
    """Each over two of four ranks, into one rank and into whole groups on two; and
    back.
    """
    check(saves, CUT_GROUPS, RESHARDABLE, TP4, at_load)
    check(saves, CUT_GROUPS, RESHARDABLE, at_load, TP4)


PARALLEL, ASYNCHRONOUS = (True, False), (False, True)
FROM = DP3_OVERLAP
TO = DP2_OVERLAP


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        # Megatron reads no dp_zero_gather_scatter in parallel
        (
            PARALLEL,
            [format for format in TORCH_DIST if format != "dp_zero_gather_scatter"],
        ),
        (ASYNCHRONOUS, TORCH_DIST),
        ((True, True), [RESHARDABLE]),
    ],
    ids=["parallel", "async", "parallel-async"],
)
def test_ways_to_save(
    options: tuple[bool, ...], formats: list[str], saves: Saves
) -> None:
    """The steps that are taken while processes of their own write do not change what is
    saved.
    """
    for format in formats:
        at_load = replace(TO, tp=2) if format == RESHARDABLE else TO
        check(saves, replace(DENSE, layers=2), format, FROM, at_load, options)


def test_boundary_parameters_are_cut_elsewhere(saves: Saves) -> None:
    """Without this, shards that all end between parameters would pass."""
    runs = check(saves, DENSE, RESHARDABLE, FROM, replace(TO, bucket_size=SMALLER))
    cuts = [
        {
            (name, start)
            for held in each
            for name, (start, _, _) in held[0]["shards"].items()
            if start
        }
        for each in runs
    ]
    assert len(cuts[0] - cuts[1]) > 5 and len(cuts[1] - cuts[0]) > 5


# --- what a format cannot change ------------------------------------------------------

BUCKETS = DP2_OVERLAP
CHANGES = {
    "tp": (DENSE, TP2, ONE),
    "more tp": (DENSE, ONE, TP2),
    "pp": (DENSE, PP2, ONE),
    "tp to pp": (DENSE, TP2, PP2),
    "chunks": (DENSE, PP2, Topology.of("pp2 chunks2")),
    "ep": (MOE, DP2_EP2, ONE),
    "more ep": (MOE, DP2_EP2, DP4_EP4),
    # as many elements in every buffer: AdamW takes a half of each of two experts for a
    # whole one
    "ep to expert tp": (
        MOE,
        Topology.of("tp2 dp2 sp ep4 etp1"),
        TP2_DP2_EP2,
    ),
}


def _cuts() -> list[Any]:
    """With the default format first: all of that are fast."""
    fixed = [format for format in formats() if format != RESHARDABLE]
    return [
        pytest.param(
            change, format, marks=() if format == fixed[0] else (pytest.mark.slow,)
        )
        for format in fixed
        for change in CHANGES
    ]


@pytest.mark.parametrize(("change", "format"), _cuts())
def test_another_cut_is_refused(change: str, format: str, saves: Saves) -> None:
    """On every rank, with the way out."""
    case, at_save, at_load = CHANGES[change]
    folder, _ = saves(case, at_save, format)
    for text in on_ranks(refused, case, at_load, format, folder):
        assert "--dist-ckpt-optim-fully-reshardable" in text, text


@pytest.mark.skipif(
    "dp_reshardable" not in formats(), reason="this Megatron has no such format"
)
def test_a_rank_without_a_piece_of_a_bucket_is_refused(tmp_path: Path) -> None:
    """Megatron: 'empty bucket encountered'. An embedding that stages share has a bucket
    of its own, and leaves a small one.
    """
    topology = Topology.of("pp2 dp3 overlap chunks2")
    args = (CASES["tied"], topology, "dp_reshardable", tmp_path)
    for text in run(error_of_save, topology.world_size, *args, timeout=_limit(6)):
        assert "--ddp-bucket-size" in text, text


@pytest.mark.skipif(
    "dp_reshardable" not in formats(), reason="this Megatron has no such format"
)
def test_buckets_may_be_others(saves: Saves) -> None:
    """Not so with AdamW: Megatron has a tensor for each bucket, here is one for each
    parameter.
    """
    for other in (
        replace(BUCKETS, bucket_size=SMALLER),
        replace(BUCKETS, overlap=False, dp=3),
    ):
        check(saves, DENSE, "dp_reshardable", BUCKETS, other)


# --- what the tests above rest on -----------------------------------------------------


def test_the_covering_set_covers() -> None:
    """Without this, a fault in the generator could leave out what is to be shown."""
    every = covering_set()
    assert {change.format for change in every} == set(formats())
    assert {change.case for change in every} == set(CASES)
    assert 40 <= len(every) <= 100 and len(small_set()) == 12
    full = [change for change in every if change.format == RESHARDABLE]
    sizes = ["tp", "pp", "dp", "cp", "chunks", "instances", "bucket_size", "overlap"]
    for size in [*sizes, "ep"] if VERSION >= (0, 14) else sizes:
        pairs = {(getattr(c.saved, size), getattr(c.loaded, size)) for c in full}
        changed = {(a, b) for a, b in pairs if a != b}
        assert changed and changed == {(b, a) for a, b in changed}, size
