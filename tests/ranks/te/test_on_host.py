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
from ranks.step.test_every_rule import _by as by_rule
from ranks.te.test_precision_aware import _of_optimizer as of_optimizer
from ranks.te.test_precision_aware import _switched as switched
from support.checkpoints.resharding import loaded, saved
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import DEFAULT, FORMATS, RESHARDABLE, in_every_format
from support.installed import VERSION, needs_te
from support.models.gpt import (
    ON_HOST,
    Case,
    Topology,
    differences,
    distributed_optimizers,
    muon_weights,
    start,
    take_step,
    trained,
    truth,
)
from support.ranks import error_of, run, run_alone, run_on
from support.runs.watching import logged
from support.runs.whole import Whole, whole

pytestmark = needs_te

PLAIN = Case()
HOSTED = replace(
    PLAIN,
    narrow=(
        ON_HOST,
        ("overlap_cpu_optimizer_d2h_h2d", True),
        ("optimizer_offload_fraction", 1.0),
        *((("store_param_remainders", False),) if VERSION >= (0, 13) else ()),
    ),
)
HALVES = replace(HOSTED, narrow=(*HOSTED.narrow[:3], ("store_param_remainders", True)))
if VERSION < (0, 13):  # which has no such setting
    HALVES = HOSTED
HALF = replace(
    HOSTED,
    narrow=(
        *HOSTED.narrow[:2],
        ("optimizer_offload_fraction", 0.5),
        *HOSTED.narrow[3:],
    ),
)
BF16 = replace(HOSTED, narrow=(*HOSTED.narrow, ("exp_avg_dtype", torch.bfloat16)))
ONE_BY_ONE = (("round_bytes", 1),)
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
        replace(HOSTED, muon=ONE_BY_ONE),
        HALVES,
        replace(HALF, muon=ONE_BY_ONE, fp32_grads=False),
        BF16,
        replace(HOSTED, bf16=False, fp16=True, overflow=((1, "*.linear_fc1.weight"),)),
        replace(HOSTED, **MOE),
        replace(HALVES, weight_decay=0.0, muon=(("rule", "hyperball"), *ONE_BY_ONE)),
        replace(HALVES, muon=(("rule", "normuon"), *ONE_BY_ONE)),
        HOSTED.with_muon(momentum_warmup=2, cautious_decay=True),
        replace(HALVES, muon=(("rule", "namo"), *ONE_BY_ONE)),
    ],
    ids=(
        "plain clip rounds halves half bf16 fp16 experts hyperball normuon warm-up namo"
    ).split(),
)
def test_muons_part_is_that_of_state_on_the_device(case: Case) -> None:
    _check_same(truth(_without(case)), truth(case), case)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_every_rule_over_every_topology(name: str, rule: str) -> None:
    """The narrow optimizer's state on the host, on the device, and the wide one's."""
    plain, topology = CASES[name]
    experts = MOE if plain.moe else {}
    plain = replace(by_rule(rule, plain), bf16=True, **experts)
    case = replace(plain, narrow=HALVES.narrow)
    on_device = trained(_without(case), topology)
    _check_same(on_device, trained(case, topology), case)
    wide = of_optimizer(trained(plain, topology))
    assert differences(wide, of_optimizer(on_device)) == []


@pytest.mark.parametrize(
    ("case", "topology"),
    [
        (HOSTED, Topology(2, 2, 2, overlap=True, sequence_parallel=True)),
        (replace(HOSTED, fp32_grads=False), Topology(dp=3)),
        (replace(HOSTED, **MOE), Topology(tp=2, dp=2, ep=2, sequence_parallel=True)),
        (replace(HOSTED, layers=4), Topology(pp=2, dp=2, chunks=2)),
    ],
    ids=["dense", "dp3", "experts", "vpp"],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    case = replace(case, muon=ONE_BY_ONE)
    _check_same(truth(case), trained(case, topology), case)


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [HALVES, HALF, replace(HOSTED, **MOE)], ids=["16", "half", "moe"]
)
@in_every_format
def test_a_run_resumes_from_a_checkpoint(
    case: Case, format: str, tmp_path: Path
) -> None:
    topology = Topology(dp=2, ep=2 if case.moe else 1)
    check_resumed(case, topology, format, tmp_path, dirty=case.moe)


@pytest.mark.parametrize(
    ("at_save", "at_load"),
    [(HOSTED, HOSTED), (PLAIN, HOSTED), (HOSTED, PLAIN), (_without(HALVES), HALVES)],
    ids=["resharded", "from-device", "to-device", "from-narrow"],
)
def test_another_topology_or_place(
    at_save: Case, at_load: Case, tmp_path: Path
) -> None:
    before = Topology(tp=2, dp=2, sequence_parallel=True)
    after = Topology(pp=2, dp=3, overlap=True)
    format = RESHARDABLE
    one = run_on(saved, at_save, before, format, str(tmp_path))
    other = run_on(loaded, at_load, after, format, str(tmp_path))
    first, then = (
        [whole([held[when] for held in runs]) for when in range(2)]
        for runs in (one, other)
    )
    assert differences(of_optimizer(first[0]), of_optimizer(then[0])) == []
    _check_same(first[1], then[1], HOSTED)


@pytest.mark.parametrize("format", FORMATS[:2])
def test_switches_between_muon_and_adamw(format: str, tmp_path: Path) -> None:
    """AdamW's checkpoint of state on the host, too, each with and without it on the
    other side.
    """
    for unlike in run(switched, 2, HOSTED, format, str(tmp_path)):
        assert unlike == []


def _read_by_adamw() -> str:
    built = start(replace(HOSTED, optimizer="adam"), Topology())
    return error_of(lambda: reading_muon(built.optimizer, {}).__enter__())


def test_a_switch_to_adamw_on_the_host_is_refused() -> None:
    assert "load it once without --optimizer-cpu-offload" in run_alone(_read_by_adamw)


# --- what a run may do otherwise ------------------------------------------------------


def _reloaded() -> list[bool]:
    """Main parameters of a model that is loaded without its optimizer, after a step."""
    built = start(HALVES, Topology(dp=2))
    take_step(built, 0)
    with torch.no_grad():
        for param in built.params.values():
            param.mul_(-0.5)
    built.optimizer.reload_model_params()
    return [
        torch.equal(part.states.get(shard, "param"), shard.float())
        for part in distributed_optimizers(built.optimizer)
        for shard in part._shard_of.values()
    ]


def test_main_parameters_follow_a_loaded_model() -> None:
    for same in run(_reloaded, 2):
        assert same and all(same)


def test_a_logging_step_changes_no_bit() -> None:
    case = replace(HOSTED, muon=ONE_BY_ONE)
    seen, _ = logged(case, Topology(dp=2))
    _check_same(truth(case), seen, case)


def _refused(change: dict[str, Any]) -> str:
    return error_of(lambda: start(replace(HOSTED, **change), Topology()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"narrow": (*HOSTED.narrow, ("exp_avg_dtype", torch.float16))},
            "exp_avg_dtype=torch.fl",
        ),
        ({"islands": ("*fc1*",)}, "optimizer_cpu_offload with fp32 weights"),
    ],
    ids=["dtype", "fp32-weights"],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    assert said in run_alone(_refused, change)


@pytest.mark.parametrize("where", ["momentum", "update"])
def test_half_a_step_is_refused_until_a_load(where: str, tmp_path: Path) -> None:
    """What visits the device then is not what the load fills."""
    case = replace(HOSTED, muon=ONE_BY_ONE)
    check_half_step(case, Topology(tp=2), where, DEFAULT, tmp_path)
