"""State on the host (--optimizer-cpu-offload): Muon's comes by round, AdamW's is
Megatron's own.

Muon's part is that of a run without the flag, in bits. AdamW's is torch's, on the host.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import reading_muon
from ranks.errors.test_half_done import check_half_step
from ranks.step.test_every_rule import CASES, PAIRS
from ranks.te.test_precision_aware import _switched as switched
from support.checkpoints.resharding import resharded
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import formats
from support.installed import VERSION
from support.marks import in_each_format, needs_te
from support.models.gpt import (
    ON_HOST,
    Case,
    Topology,
    differences,
    error_of_start,
    muon_weights,
    on_ranks,
    start,
    stepped,
    trained,
    truth,
)
from support.ranks import error_of, run
from support.runs.topologies import (
    DP2,
    DP3,
    ONE,
    PP2_DP2_CHUNKS2,
    PP2_DP3_OVERLAP,
    TP2,
    TP2_DP2_EP2,
    TP2_DP2_SP,
    TP2_PP2_DP2_OVERLAP_SP,
)
from support.runs.watching import logged
from support.runs.whole import Whole, of_optimizer

pytestmark = needs_te

PLAIN = Case()
HOSTED = PLAIN.with_narrow(
    **dict([ON_HOST]),
    overlap_cpu_optimizer_d2h_h2d=True,
    optimizer_offload_fraction=1.0,
)
HALVES = HOSTED  # before core 0.13, which has no such setting
if VERSION >= (0, 13):
    HALVES = HOSTED.with_narrow(store_param_remainders=True)
    HOSTED = HOSTED.with_narrow(store_param_remainders=False)
HALF = HOSTED.with_narrow(optimizer_offload_fraction=0.5)
BF16 = HOSTED.with_narrow(exp_avg_dtype=torch.bfloat16)
IN_ROUNDS = HALVES.with_muon(round_bytes=1)  # one for each matrix
MOE = {"moe": True, "grouped": "te"}


def _without(case: Case) -> Case:
    """The same run with the state on the device."""
    narrow = [
        (name, value) for name, value in case.narrow or () if name not in _OFFLOADS
    ]
    return replace(case, narrow=tuple(narrow))


_OFFLOADS = {ON_HOST[0], "overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"}


def _check_same(one: Whole, other: Whole, case: Case) -> None:
    """Muon's in bits. Torch's AdamW on a CPU rounds a tail otherwise than a vector."""
    muons = muon_weights(case)
    # weights by halves
    kinds = ("main", "exp_avg", "params")[: 2 if VERSION < (0, 13) else 3]
    bits = [
        {k: {n: whole[k][n] for n in muons} for k in kinds} for whole in (one, other)
    ]
    assert differences(*bits) == []
    if case == BF16:  # HybridDeviceOptimizer holds AdamW's in fp32, whatever is asked
        return
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            assert torch.allclose(value, other[kind][name], rtol=2e-5, atol=1e-7), (
                kind,
                name,
            )


@pytest.mark.parametrize(
    "case",
    [
        HOSTED,
        replace(HOSTED, clip=1.0, fp32_grads=False),
        HOSTED.with_muon(round_bytes=1),
        HALVES,
        replace(HALF, fp32_grads=False).with_muon(round_bytes=1),
        BF16,
        replace(HOSTED, bf16=False, fp16=True, overflow=((1, "*.linear_fc1.weight"),)),
        replace(HOSTED, **MOE),
        replace(IN_ROUNDS, weight_decay=0.0).with_muon(rule="hyperball"),
        IN_ROUNDS.with_muon(rule="normuon"),
        HOSTED.with_muon(momentum_warmup=2, cautious_decay=True),
        IN_ROUNDS.with_muon(rule="namo"),
    ],
)
def test_muons_part_is_that_of_state_on_the_device(case: Case) -> None:
    _check_same(truth(_without(case)), truth(case), case)


@pytest.mark.slow
@pytest.mark.parametrize("name, rule", PAIRS)
def test_every_rule_over_every_topology(name: str, rule: str) -> None:
    """The narrow optimizer's state on the host, on the device, and the wide one's."""
    plain, topology = CASES[name]
    experts = MOE if plain.moe else {}
    plain = replace(plain.with_muon(rule=rule), bf16=True, **experts)
    case = replace(plain, narrow=HALVES.narrow)
    on_device = trained(_without(case), topology)
    _check_same(on_device, trained(case, topology), case)
    wide = of_optimizer(trained(plain, topology))
    assert differences(wide, of_optimizer(on_device)) == []


@pytest.mark.parametrize(
    "case, topology",
    [
        (HOSTED, TP2_PP2_DP2_OVERLAP_SP),
        (replace(HOSTED, fp32_grads=False), DP3),
        (replace(HOSTED, **MOE), TP2_DP2_EP2),
        (replace(HOSTED, layers=4), PP2_DP2_CHUNKS2),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    case = case.with_muon(round_bytes=1)
    _check_same(truth(case), trained(case, topology), case)


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("case", [HALVES, HALF, replace(HOSTED, **MOE)])
@in_each_format
def test_a_run_resumes_from_a_checkpoint(
    case: Case, format: str, tmp_path: Path
) -> None:
    topology = Topology(dp=2, ep=2 if case.moe else 1)
    check_resumed(case, topology, format, tmp_path, dirty=case.moe)


@pytest.mark.parametrize(
    "at_save, at_load",
    [(HOSTED, HOSTED), (PLAIN, HOSTED), (HOSTED, PLAIN), (_without(HALVES), HALVES)],
)
def test_another_topology_or_place(
    at_save: Case, at_load: Case, tmp_path: Path
) -> None:
    before = TP2_DP2_SP
    one, other = resharded(at_save, before, at_load, PP2_DP3_OVERLAP, tmp_path)
    assert differences(of_optimizer(one[0]), of_optimizer(other[0])) == []
    _check_same(one[1], other[1], HOSTED)


@pytest.mark.parametrize("format", formats()[:2])
def test_switches_between_muon_and_adamw(format: str, tmp_path: Path) -> None:
    """AdamW's checkpoint of state on the host, too, each with and without it on the
    other side.
    """
    for unlike in run(switched, 2, HOSTED, format, tmp_path):
        assert unlike == []


def _read_by_adamw() -> str:
    built = start(replace(HOSTED, optimizer="adam"), ONE)
    return error_of(lambda: reading_muon(built.optimizer, {}).__enter__())


def test_a_switch_to_adamw_on_the_host_is_refused() -> None:
    assert "load it once without --optimizer-cpu-offload" in run(_read_by_adamw, 1)[0]


# --- what a run may do otherwise ------------------------------------------------------


def _reloaded() -> list[bool]:
    """Main parameters of a model that is loaded without its optimizer, after a step."""
    built = stepped(HALVES, DP2, 1)
    with torch.no_grad():
        for param in built.params.values():
            param.mul_(-0.5)
    built.optimizer.reload_model_params()
    return [
        torch.equal(part.states.get(shard, "param"), shard.float())
        for part in built.parts
        for shard in part._shard_of.values()
    ]


def test_main_parameters_follow_a_loaded_model() -> None:
    for same in run(_reloaded, 2):
        assert same and all(same)


def test_a_logging_step_changes_no_bit() -> None:
    case = HOSTED.with_muon(round_bytes=1)
    seen, _ = logged(case, DP2)
    _check_same(truth(case), seen, case)


@pytest.mark.parametrize(
    "change, said",
    [
        (
            {"narrow": HOSTED.with_narrow(exp_avg_dtype=torch.float16).narrow},
            "exp_avg_dtype=torch.fl",
        ),
        ({"islands": ("*fc1*",)}, "optimizer_cpu_offload with fp32 weights"),
    ],
    ids=["dtype", "fp32-weights"],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    assert said in on_ranks(error_of_start, replace(HOSTED, **change), ONE)[0]


@pytest.mark.parametrize("where", ["momentum", "update"])
def test_half_a_step_is_refused_until_a_load(where: str, tmp_path: Path) -> None:
    """What visits the device then is not what the load fills."""
    case = HOSTED.with_muon(round_bytes=1)
    check_half_step(case, TP2, where, formats()[0], tmp_path)
