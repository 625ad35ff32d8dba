"""Save, load and go on, in each of Megatron's formats: bitwise as if the run had not
stopped.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints.resuming import check
from support.checkpoints.saving import formats, load, resumed, save_new
from support.models.gpt import Case, Topology, on_ranks, printed_by, start, take_step
from support.models.torch_adam import torchs_own_adam
from support.ranks import run
from support.runs.topologies import (
    DP2,
    DP2_EP2,
    DP3,
    DP3_OVERLAP,
    DP4_EP2,
    DP4_INSTANCES2,
    PP2_DP2,
    PP2_DP2_CHUNKS2,
    TP2,
    TP2_DP2,
    TP2_DP2_EP2,
)

BF16 = Case()
FP32 = replace(BF16, bf16=False)
# The scale halves in steps 1 and 4 and doubles in between: before, at and after the
# load.
OVERFLOWS = tuple((step, "*layers.0.mlp.linear_fc1.weight") for step in (1, 4))
FP16 = replace(FP32, fp16=True, steps=8, overflow=OVERFLOWS)
MOE = replace(BF16, moe=True)
ONLY_EXPERTS = replace(
    MOE, frozen=("embedding.*", "output_layer.*", "*norm*", "*.self_attention.*")
)
ONLY_EXPERTS = replace(
    ONLY_EXPERTS, frozen=(*ONLY_EXPERTS.frozen, "*router*", "*shared*")
)
FEW = (("muon_exclude", ("*mlp*", "*linear_qkv*")),)
GROUPS = replace(BF16, faster=("*.linear_fc2.*", "decoder.layers.1.*", "embedding.*"))
DEFAULT, *OTHERS = formats()
EVERY = [DEFAULT, *OTHERS]
SLOW = [pytest.param(f, marks=pytest.mark.slow) for f in OTHERS if f != "torch"]
MOSTLY = [DEFAULT, "torch", *SLOW]


@pytest.mark.parametrize("dirty", [False, True], ids=["", "over-a-run"])
@pytest.mark.parametrize("format", EVERY)
def test_boundary_parameters_in_buckets(
    format: str, dirty: bool, tmp_path: Path
) -> None:
    """DP 3 cuts parameters; several buckets with padding between them."""
    check(BF16, DP3_OVERLAP, format, tmp_path, dirty=dirty)


@pytest.mark.parametrize("format", MOSTLY)
def test_tp_pp_dp(format: str, tmp_path: Path) -> None:
    check(BF16, Topology.of("tp2 pp2 dp2 overlap"), format, tmp_path)


FACTORS = (("embedding.*", 0.5), ("*.linear_fc2.*", 3.0))
MULTIPLIED = BF16.with_muon(lr_mults=FACTORS, wd_mults=FACTORS)
TABLE = (
    "embedding.*:lr=0.01",
    "*.linear_fc2.*:lr=0.06,weight_decay=0.02,ns_steps=6,momentum=0.8",
    "*.linear_fc1.*:weight_decay=0",
)
BY_PATTERN = BF16.with_muon(by_pattern=TABLE)
KINDS = {
    # main parameters are views of the model's
    "fp32": (FP32, DP3_OVERLAP),
    "fp16": (FP16, TP2_DP2),
    "experts": (MOE, DP2_EP2),
    # they share a loss scale
    "experts in fp16": (
        replace(FP16, moe=True, overflow=((1, "*.experts.*"),)),
        DP4_EP2,
    ),
    # Megatron then makes a stub for the dense part, whose state it asks for and fails
    "only experts": (ONLY_EXPERTS, DP2_EP2),
    "groups that Megatron takes for one another": (GROUPS, DP2),
    "groups of multipliers": (MULTIPLIED, DP2),
    "settings by pattern": (BY_PATTERN, TP2_DP2),
    "radii of a sphere": (
        replace(MOE, weight_decay=0.0).with_muon(rule="hyperball"),
        DP2_EP2,
    ),
    "second moments beside int8": (
        BF16.with_muon(rule="normuon", momentum_dtype="int8"),
        DP3_OVERLAP,
    ),
    "second moments of matrices": (
        MOE.with_muon(rule="namo", split_matrices=2),
        TP2_DP2_EP2,
    ),
    "second moments at homes": (
        MOE.with_muon(rule="normuon", split_matrices=2),
        TP2_DP2_EP2,
    ),
}


@pytest.mark.parametrize("format", MOSTLY)
@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_all_kinds(kind: str, format: str, tmp_path: Path) -> None:
    check(*KINDS[kind], format, tmp_path)


def _rates(built: Any) -> set[tuple[float, ...]]:
    """Learning rate and weight decay of each group, as multiples of the run's."""
    return {
        (
            group["max_lr"] * group["lr_mult"] / built.case.lr,
            group["wd_mult"],
            group.get("end_wd", -1.0),
        )
        for group in built.param_groups
    }


def _rates_at_load(
    case: Case, format: str, folder: Path
) -> list[set[tuple[float, ...]]]:
    built = start(case, DP2)
    own = _rates(built)
    load(built, folder, format)
    take_step(built, 0)
    return [own, _rates(built)]


@pytest.mark.parametrize("saved", [MULTIPLIED, BY_PATTERN])
@pytest.mark.parametrize("format", MOSTLY)
def test_a_run_has_its_own_multipliers_after_a_load(
    format: str, saved: Case, tmp_path: Path
) -> None:
    """Those of the checkpoint's groups, which pass for them, would undo what the run
    asks for.
    """
    on_ranks(save_new, saved, DP2, format, tmp_path)
    other = (("lr_mults", (("*.linear_fc2.*", 2.0),)),)
    table = (("by_pattern", ("*.linear_fc2.*:lr=0.03,weight_decay=0.2",)),)
    asked = [BF16, *(replace(BF16, muon=muon) for muon in (other, table))]
    for case in (*asked, MULTIPLIED, BY_PATTERN):
        for own, loaded in run(_rates_at_load, 2, case, format, tmp_path):
            assert own == loaded, case.muon


@pytest.mark.parametrize("format", MOSTLY)
def test_a_rank_without_muon(format: str, tmp_path: Path) -> None:
    """One weight is Muon's, which not every DP rank has a piece of."""
    results = check(replace(BF16, layers=1, muon=FEW), DP3, format, tmp_path)
    muons = [
        [
            name
            for name, (_, _, arrays) in result["held"]["shards"].items()
            if len(arrays) == 2
        ]
        for result in results
    ]
    assert [] in muons and any(muons)


FROZEN_STAGE = replace(
    BF16, frozen=("decoder.layers.1.*", "decoder.final*", "output_layer*")
)
CHUNKS = PP2_DP2_CHUNKS2
OTHER_SHAPES = {
    "chunks": (replace(BF16, layers=4), CHUNKS),
    "step-overlap": (
        replace(BF16, layers=4),
        replace(CHUNKS, overlap=True, step_overlap=True),
    ),
    "instances": (BF16, DP4_INSTANCES2),
    "tied-gated": (replace(BF16, tied=True, gated=True), PP2_DP2),
    "mla-mtp": (replace(BF16, mla="duplicated", mtp=True), TP2_DP2),
    "legacy-experts": (replace(MOE, grouped="legacy", gated=True), TP2_DP2_EP2),
    "cp": (BF16, Topology.of("dp2 cp2")),
    # before core 0.14 its ranks have stubs
    "frozen-stage": (FROZEN_STAGE, PP2_DP2),
}


@pytest.mark.parametrize(
    "format", [DEFAULT, pytest.param("torch", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_other_shapes(shape: str, format: str, tmp_path: Path) -> None:
    case, topology = OTHER_SHAPES[shape]
    if topology.instances > 1 and format == "dp_zero_gather_scatter":
        pytest.skip("Megatron reads it into the first instance only: it is refused")
    check(case, topology, format, tmp_path)


def test_transformer_engines_experts(tmp_path: Path) -> None:
    """Their stand-in cannot say for torch_dist which expert a weight is."""
    check(replace(MOE, grouped="te"), DP2_EP2, "torch", tmp_path)


# --- over torch's own AdamW -----------------------------------------------------------


def _resumed_over_torchs_adam(*args: Any) -> dict[str, Any]:
    with torchs_own_adam():
        return resumed(*args)


@pytest.mark.parametrize("format", EVERY)
def test_over_torchs_own_adamw(format: str, tmp_path: Path) -> None:
    """Megatron's own state of it comes back wrong, or not at all, in most formats.

    Also within a period of full and block steps."""
    in_turns = replace(BF16, gated=True).with_muon(full_period=3, block_lr_mult=0.5)
    for case, topology in ((BF16, DP2), (in_turns, TP2)):
        folder = tmp_path / str(topology)
        for result in on_ranks(
            _resumed_over_torchs_adam, case, topology, format, folder
        ):
            assert result["differences"] == [] and result["moved"]


# --- settings -------------------------------------------------------------------------


def _decays_after_load(
    case: Case, saved: Case, format: str, folder: Path
) -> tuple[list[float], str]:
    save_new(saved, DP2, format, folder)
    built = start(case, DP2)
    _, printed = printed_by(lambda: load(built, folder, format))
    take_step(built, 0)
    return [group["wd_mult"] for group in built.param_groups], printed


@pytest.mark.parametrize("format", [DEFAULT, "torch"])
@pytest.mark.parametrize("now", [True, False])
def test_weight_decay_of_all_parameters_survives_a_load(
    now: bool, format: str, tmp_path: Path
) -> None:
    of_all = BF16.with_muon(weight_decay_all_params=True)
    case, saved = (of_all, BF16) if now else (BF16, of_all)
    results = run(_decays_after_load, 2, case, saved, format, tmp_path)
    setting = "weight_decay_all_params (--weight-decay-all-params)"
    line = f"{setting} is {now} now; the checkpoint was saved with {not now}"
    for rank, (mults, printed) in enumerate(results):
        assert set(mults) == ({1.0} if now else {0.0, 1.0})
        assert (line in printed) == (rank == 0)
