"""States in fewer bytes (--use-precision-aware-optimizer), over Transformer Engine's
FusedAdam.

Its Python is real: which states there are, in which dtypes, how they are scaled. Main
parameters in 16 + 16 bits are exact, so with an fp32 momentum a step is that without
the flag, in bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_muon.rules.muon import Foreach
from support.checkpoints.resharding import check_resharded
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import (
    formats,
    load,
    reading_the_other,
    resumed,
    save,
    spoil,
)
from support.installed import VERSION
from support.marks import in_each_format, needs_te
from support.models.gpt import (
    ON_HOST,
    Case,
    Topology,
    build,
    check,
    error_of_optimizer,
    held,
    muon_weights,
    on_ranks,
    set_schedule,
    start,
    stepped,
    take_step,
    take_steps,
    trained,
    truth,
    write_grads,
)
from support.ranks import error_of, run
from support.runs.topologies import (
    DP2,
    DP3,
    ONE,
    PP2_DP2_CHUNKS2,
    PP2_DP3_OVERLAP,
    TP2_DP2,
    TP2_DP2_EP2,
    TP2_DP2_OVERLAP_SP,
    TP2_DP2_SP,
    TP2_PP2_DP2_OVERLAP_SP,
)
from support.runs.watching import logged
from support.runs.whole import differences, of_optimizer

pytestmark = needs_te

Narrow = tuple[tuple[str, Any], ...]


def _moments(dtype: torch.dtype) -> Narrow:
    return ("exp_avg_dtype", dtype), ("exp_avg_sq_dtype", dtype)


PLAIN = Case()
EXACT = replace(PLAIN, narrow=())
BF16, FP16, FP8 = (
    replace(PLAIN, narrow=_moments(dtype))
    for dtype in (torch.bfloat16, torch.float16, torch.uint8)
)
WHOLE: Narrow = (("store_param_remainders", False),)  # fp32 main parameters
SHARDS: Narrow = (("fp8_recipe", "tensorwise"),)  # Megatron has fp32 shards then
HALF: Narrow = (*WHOLE, ("main_params_dtype", torch.float16))
MOE = {"moe": True, "grouped": "te"}
IN_FP16 = {"bf16": False, "fp16": True, "overflow": ((1, "*.linear_fc1.weight"),)}


@pytest.fixture(autouse=True)
def _needs_the_option(request: pytest.FixtureRequest) -> None:
    given = repr(getattr(getattr(request.node, "callspec", None), "params", ""))
    if VERSION < (0, 13) and (
        "store_param_remainders" in given or "fp8_recipe" in given
    ):
        pytest.skip("this core always keeps remainders")


@pytest.mark.parametrize(
    "change",
    [
        {"clip": 1.0},
        {"narrow": WHOLE},
        {"narrow": SHARDS},
        {"islands": ("*fc1*",)},
        # clipped, they would be rounded to bf16 again, as AdamW's are
        {"fp32_grads": False},
        MOE,
        {**IN_FP16, "clip": 1.0},
        {"weight_decay": 0.0, "muon": (("rule", "hyperball"),)},
        {"muon": (("rule", "normuon"),)},
        {"muon": (("rule", "namo"),)},
    ],
    ids="""
        remainders masters shards fp32-weights bf16-grads experts fp16 hyperball normuon
        namo
    """.split(),
)
def test_with_fp32_values_a_step_is_that_without_the_flag(change: Any) -> None:
    case = replace(EXACT, **change)
    plain = truth(replace(case, narrow=None))
    narrow = truth(case)
    assert differences(of_optimizer(plain), of_optimizer(narrow)) == []
    for name, main in narrow["main"].items():
        assert torch.equal(narrow["params"][name], _weight(main, case, name)), name


@contextmanager
def _of_one_dtype() -> Iterator[None]:
    """Within it gradients are refused in two dtypes, and in fp16, as fused kernels
    do.
    """
    plain = Foreach.advance_momentum

    def strict(
        self: Foreach, momenta: Any, grads: Any, *args: Any, **kwargs: Any
    ) -> None:
        assert {grad.dtype for grad in grads} in ({torch.float32}, {torch.bfloat16})
        plain(self, momenta, grads, *args, **kwargs)

    with mock.patch.object(Foreach, "advance_momentum", strict):
        yield


@pytest.mark.parametrize("change", [{"islands": ("*fc1*",)}, IN_FP16])
def test_a_rounds_gradients_are_of_one_dtype_that_kernels_take(change: Any) -> None:
    case = replace(EXACT, fp32_grads=False, **change)
    assert differences(truth(case), trained(case, ONE, _of_one_dtype)) == []


def _weight(main: Tensor, case: Case, name: str) -> Tensor:
    """What FusedAdam rounds a main parameter to: by remainders away from zero in a
    tie.
    """
    if "fc1" in name and case.islands:
        return main
    if case.fp16 or case.narrow in (WHOLE, SHARDS):
        return main.to(case.dtype).float()
    bits = main.view(torch.int32)
    return (((bits + 0x8000) >> 16) << 16).view(torch.float32)


@pytest.mark.parametrize(
    "case, topology",
    [
        (BF16, TP2_PP2_DP2_OVERLAP_SP),
        (replace(BF16, fp32_grads=False, narrow=WHOLE), DP3),
        (replace(BF16, **MOE), TP2_DP2_EP2),
        (BF16.with_narrow(**dict(SHARDS)), TP2_DP2),
        (replace(BF16, layers=4), PP2_DP2_CHUNKS2),
        (replace(BF16, **IN_FP16), TP2_DP2_OVERLAP_SP),
    ],
)
def test_a_topology_equals_one_process(case: Case, topology: Topology) -> None:
    """But for states in fp16, whose scales are those of a shard, as AdamW's."""
    check(case, topology)


def test_logging_changes_no_bit() -> None:
    case = BF16.with_muon(round_bytes=1)
    seen, _ = logged(case, TP2_DP2_OVERLAP_SP)
    assert differences(truth(case), seen) == []


@pytest.mark.parametrize(
    "case, off, floor",
    [(BF16, 2.0**-8, 0.0), (FP16, 2.0**-11, 2.0**-39), (FP8, 2.0**-4, 2.0**-18)],
)
def test_momentum_is_rounded_to_nearest_and_newton_schulz_gets_it_unrounded(
    case: Case, off: float, floor: float
) -> None:
    """Half a unit in the last place, and of the smallest of a shard's largest in fp16
    and fp8.
    """
    one = truth(replace(case, steps=1))
    plain = truth(replace(PLAIN, steps=1))
    for name in muon_weights(case):
        assert torch.equal(one["main"][name], plain["main"][name]), name
        rounded, exact = one["exp_avg"][name], plain["exp_avg"][name]
        least = floor * exact.abs().max()
        assert ((rounded - exact).abs() <= off * exact.abs() + least).all(), name


def test_a_momentum_of_zeros_stays_zero_in_fp8() -> None:
    without = truth(replace(FP8, zero_grads=("*.linear_fc1.weight",)))
    for name, momentum in without["exp_avg"].items():
        assert bool(momentum.any()) is not name.endswith("linear_fc1.weight"), name
        assert momentum.isfinite().all() and without["main"][name].isfinite().all(), (
            name
        )


def _bytes(case: Case) -> dict[str, float]:
    """Bytes an element of the state of Muon's and of AdamW's bf16 weights, beside the
    weights.
    """
    built = stepped(case, DP2, 1)
    found = {"muon": [0, 0], "adamw": [0, 0]}
    for part in built.parts:
        for shard, state in part.optimizer.state.items():
            kind = found["muon" if part.muon.owns(shard) else "adamw"]
            kind[0] += sum(
                getattr(each, "_data", each).nbytes for each in state.values()
            )
            kind[0] += shard.nbytes * (shard.dtype == torch.float32)
            kind[1] += shard.numel()
    return {kind: nbytes / elements for kind, (nbytes, elements) in found.items()}


@pytest.mark.parametrize(
    "case, muon, adamw",
    [
        (PLAIN, 8.0, 12.0),
        (EXACT, 6.0, 10.0),
        (BF16, 4.0, 6.0),
        (FP16, 4.0, 6.0),
        (FP8, 3.0, 4.0),
        (BF16.with_narrow(**dict(HALF)), 4.0, 6.0),
        (BF16.with_narrow(**dict(WHOLE)), 6.0, 8.0),
    ],
)
def test_bytes_an_element(case: Case, muon: float, adamw: float) -> None:
    for found in run(_bytes, 2, case):
        assert found == {"muon": muon, "adamw": adamw}


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [BF16, replace(PLAIN, narrow=WHOLE), replace(BF16, **MOE), FP16]
)
@in_each_format
def test_a_run_resumes_from_a_checkpoint(
    case: Case, format: str, tmp_path: Path
) -> None:
    check_resumed(
        case, Topology(dp=2, ep=2 if case.moe else 1), format, tmp_path, dirty=case.moe
    )


def test_in_fp8_muons_state_resumes(tmp_path: Path) -> None:
    """FusedAdam finds AdamW's scales again but for the last bit."""
    muons = muon_weights(FP8)
    for result in on_ranks(resumed, FP8, DP2, formats()[0], tmp_path):
        assert [
            each for each in result["differences"] if each.split()[-1] in muons
        ] == []


@pytest.mark.parametrize(
    "at_save, at_load",
    [
        (BF16, BF16),
        (PLAIN, EXACT),
        (EXACT, PLAIN),
        (BF16, BF16.with_narrow(**dict(WHOLE))),
    ],
)
def test_another_topology_or_dtype(
    at_save: Case, at_load: Case, tmp_path: Path
) -> None:
    before = TP2_DP2_SP
    check_resharded(at_save, before, at_load, PP2_DP3_OVERLAP, tmp_path)


def _switched(muon: Case, format: str, folder: Path) -> list[str]:
    """AdamW's checkpoint into Muon's run, and Muon's into AdamW's; what is not taken
    over.
    """
    unlike = []
    adam = replace(muon, optimizer="adam")
    for narrow in (muon.narrow, None):
        for case, other in (
            (adam, replace(muon, narrow=narrow)),
            (muon, replace(adam, narrow=narrow)),
        ):
            if other.optimizer == "adam" and ON_HOST in (other.narrow or ()):
                continue  # refused
            place = f"{folder}/{case.optimizer}-{narrow is None}"
            built = stepped(case, DP2, 1)
            save(built, place, format)
            theirs = held(built)["shards"]
            built = start(other, DP2)
            spoil(built)
            with reading_the_other(built):
                load(built, place, format)
            for name, (*_, arrays) in held(built)["shards"].items():
                kinds = (
                    {"main"}
                    if name in muon_weights(muon)
                    else {"main", "exp_avg", "exp_avg_sq"}
                )
                unlike += [
                    f"{kind} of {name} from {case.optimizer}"
                    for kind in kinds
                    if (arrays[kind] != theirs[name][2][kind]).any()
                ]
            take_step(built, 2)
    return unlike


@pytest.mark.parametrize("narrow", [BF16.narrow, WHOLE], ids=["remainders", "masters"])
@pytest.mark.parametrize("format", formats()[:2])
def test_switches_between_muon_and_adamw(
    format: str, narrow: Narrow, tmp_path: Path
) -> None:
    """Each with and without the flag on the other side."""
    for unlike in run(_switched, 2, replace(PLAIN, narrow=narrow), format, tmp_path):
        assert unlike == []


# --- what a run may do otherwise ------------------------------------------------------


def _reloaded(narrow: Narrow) -> list[bool]:
    """Weights of a model that is loaded without its optimizer, before and after a
    step.
    """
    same = []
    for steps in (0, 1):
        built = start(replace(PLAIN, narrow=narrow), DP2)
        take_steps(built, range(steps))
        with torch.no_grad():
            for param in built.params.values():
                param.mul_(-0.5)
        built.optimizer.reload_model_params()
        for part in built.parts:
            same += [
                torch.equal(part.states.get(shard, "param"), shard.float())
                for group in part.optimizer.param_groups
                for shard in group["params"]
            ]
    return same


@pytest.mark.parametrize(
    "narrow", [(), WHOLE, HALF], ids=["remainders", "masters", "fp16"]
)
def test_main_parameters_follow_a_loaded_model(narrow: Narrow) -> None:
    for same in run(_reloaded, 2, narrow):
        assert same
        assert all(same) or narrow == HALF  # scaled by a shard's largest element


def _with_nan() -> str:
    built = start(EXACT, DP2)
    set_schedule(built, 0)
    write_grads(built, 0)
    built.params["decoder.final_layernorm.weight"].main_grad.fill_(float("nan"))
    said = error_of(built.optimizer.step)
    # of a late norm
    return error_of(built.optimizer.step) if said == "no error" else said


def test_gradients_that_are_not_finite_are_named() -> None:
    for said in run(_with_nan, 2):
        assert (
            "final_layernorm" in said or "previous step's gradient norm was nan" in said
        )


def _refused(change: dict[str, Any]) -> str:
    case = replace(PLAIN, **change)
    return error_of_optimizer(build(case, ONE), **dict(case.muon))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"narrow": _moments(torch.int64)}, "here: FusedAdam only supports fp32"),
        (
            {"narrow": (), "fp8": "delayed"},
            "does not support use_precision_aware_optimizer with fp8_param_gather yet",
        ),
        (
            {"narrow": (), "muon": (("momentum_dtype", "int8"),)},
            "dtype by exp_avg_dtype",
        ),
    ],
    ids=["dtype", "fp8-weights", "int8-too"],
)
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    assert said in run(_refused, 1, change)[0]
