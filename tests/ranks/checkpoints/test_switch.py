"""From AdamW's checkpoint to Muon, and back: what is kept, and what starts anew."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_muon.mcore.checkpoint.interop.adamw_after_muon import (
    YOUNG,
    go_on_after_muon,
)
from megatron_muon.mcore.checkpoint.interop.saved import Saved
from support import te_on_cpu
from support.checkpoints.saving import (
    formats,
    load,
    reading_the_other,
    save,
    save_new,
    spoil,
    unequal,
)
from support.checkpoints.sealing import plugin
from support.installed import VERSION
from support.marks import in_each_format
from support.models.gpt import (
    Built,
    Case,
    Topology,
    held,
    lr_at,
    muon_weights,
    on_ranks,
    printed_by,
    start,
    take_step,
    take_steps,
    whole_grad,
)
from support.models.torch_adam import apexs_loop, torchs_own_adam
from support.ranks import run
from support.runs.topologies import DP2, DP2_EP2, DP3, ONE, TP2

MUON = Case()
ADAM = replace(MUON, optimizer="adam")
MOE = replace(MUON, moe=True)
BETA1 = 0.9  # of Megatron's OptimizerConfig


def _switched(
    case: Case, topology: Topology, format: str, folder: Path, momentum: Any
) -> dict[str, Any]:
    assert format == "torch" or Saved.of(folder).writer == "adamw"
    built = start(case, topology)
    take_step(built, 9)  # of which nothing is left
    spoil(built)
    with plugin(built), reading_the_other(built, momentum):
        load(built, folder, format)
    before = held(built)
    take_steps(built, range(case.steps, case.steps + 2))
    return {"held": before, "after": held(built)}


NORMUON = MUON.with_muon(rule="normuon")
HYPERBALL = replace(MUON, weight_decay=0.0).with_muon(rule="hyperball")
SHAPES = {
    "dp3": (MUON, DP3),
    "moe": (MOE, DP2_EP2),
    "second moments": (NORMUON, TP2),
    "radii": (HYPERBALL, DP2),
}


@pytest.mark.parametrize("momentum", ["momentum", "fresh"])
@pytest.mark.parametrize("shape", SHAPES)
@in_each_format
def test_muon_resumes_from_adamw(
    format: str, shape: str, momentum: str, tmp_path: Path
) -> None:
    case, topology = SHAPES[shape]
    adam = replace(case, optimizer="adam")
    before = on_ranks(save_new, adam, topology, format, tmp_path)
    after = on_ranks(_switched, case, topology, format, tmp_path, momentum)
    muons = muon_weights(case)
    seen = set()
    for old, new in zip(before, after, strict=True):
        assert old["params"].keys() == new["held"]["params"].keys()
        for name, array in old["params"].items():
            assert (array == new["held"]["params"][name]).all(), name
        for name, (*span, theirs) in old["shards"].items():
            *other_span, ours = new["held"]["shards"][name]
            assert span == other_span
            for kind, array in ours.items():
                expected = theirs[kind]
                if kind == "exp_avg_sq" and name in muons:  # not of gradients
                    expected = 0 * expected
                if kind == "exp_avg" and name in muons:
                    seen.add(name)
                    first = torch.from_numpy(expected).div(1 - BETA1)
                    expected = first.numpy() if momentum == "momentum" else 0 * expected
                assert (array == expected).all(), (name, kind)
        assert any(
            (new["after"]["params"][name] != array).any()
            for name, array in old["params"].items()
        )
    assert seen == muons


# --- to AdamW -------------------------------------------------------------------------


def _adamw_step(
    arrays: dict[str, Any], grad: torch.Tensor, t: int, lr: float, decay: float
) -> dict[str, Any]:
    """Kingma and Ba's Algorithm 1 with decoupled decay, in float64."""
    beta1, beta2, eps = BETA1, 0.95, 1e-8
    main, first, second = (
        torch.as_tensor(arrays[kind]).double()
        for kind in ("main", "exp_avg", "exp_avg_sq")
    )
    first = beta1 * first + (1 - beta1) * grad.double()
    second = beta2 * second + (1 - beta2) * grad.double() ** 2
    update = first / (1 - beta1**t) / ((second / (1 - beta2**t)).sqrt() + eps)
    return {
        "main": main * (1 - lr * decay) - lr * update,
        "exp_avg": first,
        "exp_avg_sq": second,
    }


def _switch_to_adamw(
    case: Case, topology: Topology, format: str, folder: Path
) -> tuple[Built, list[str]]:
    """What is not as it should be after a switch and two steps."""
    muon = replace(case, optimizer="muon")
    before = save_new(muon, topology, format, f"{folder}/muon")
    built = start(case, topology)
    spoil(built)
    with reading_the_other(built):
        load(built, f"{folder}/muon", format)
    now = held(built)
    unlike = []
    state = {}
    for name, (*_, arrays) in now["shards"].items():
        theirs = before["shards"][name][2]
        expected = {kind: theirs[kind] for kind in ("main", *arrays) if kind in theirs}
        if name in muon_weights(case):
            expected |= {
                "exp_avg": 0 * theirs["main"],
                "exp_avg_sq": 0 * theirs["main"],
            }
        unlike += [
            f"{kind} of {name}"
            for kind in arrays
            if (arrays[kind] != expected[kind]).any()
        ]
        state[name] = arrays
    for step in range(case.steps, case.steps + 2):
        take_step(built, step)
        after = held(built)["shards"]
        for name, (begin, end, arrays) in after.items():
            young = name in muon_weights(case)
            t = step + 1 - (case.steps if young else 0)
            grad = built.local(name, whole_grad, step).reshape(-1)[begin:end]
            decay = case.weight_decay if built.params[name].dim() == 2 else 0.0
            state[name] = _adamw_step(
                state[name], grad, t, lr_at(case, step, name), decay
            )
            ours = torch.from_numpy(arrays["main"]).double()
            if not torch.allclose(ours, state[name]["main"], rtol=1e-5, atol=1e-6):
                unlike.append(f"{name} after step {step}")
    return built, unlike


def _to_adamw(case: Case, topology: Topology, format: str, folder: Path) -> list[str]:
    """What is not as it should be after that, and after a resume and one more step."""
    built, unlike = _switch_to_adamw(case, topology, format, folder)
    save(built, f"{folder}/adamw", format)
    take_step(built, case.steps + 2)
    expected_after = held(built)
    again = start(case, topology)
    young = built.optimizer.chained_optimizers[0].state_dict()[YOUNG]
    go_on_after_muon(again.optimizer, young["former"])
    spoil(again)
    load(again, f"{folder}/adamw", format)
    take_step(again, case.steps + 2)
    unlike += unequal(expected_after, held(again), "after a resume: ", log=False)
    plain = start(case, topology)  # AdamW as it is without the plugin
    spoil(plain)
    load(plain, f"{folder}/adamw", format)
    take_step(plain, case.steps + 2)
    for name, (*_, arrays) in held(plain)["shards"].items():
        if name not in muon_weights(case):
            *_, ours = expected_after["shards"][name]
            unlike += [
                f"plain {kind} of {name}"
                for kind in arrays
                if (arrays[kind] != ours[kind]).any()
            ]
    return unlike


@pytest.mark.parametrize("shape", SHAPES)
@in_each_format
def test_adamw_resumes_from_muon(format: str, shape: str, tmp_path: Path) -> None:
    """The tolerance: fp32 against float64, with sums of 2 terms that are far above
    eps.
    """
    _check_to_adamw(_to_adamw, shape, format, tmp_path)


def _to_adamw_with_apexs_loop(*args: Any) -> list[str]:
    with apexs_loop():
        return _to_adamw(*args)


def test_apexs_adam_resumes_from_muon(tmp_path: Path) -> None:
    _check_to_adamw(_to_adamw_with_apexs_loop, "dp3", formats()[0], tmp_path)


def _to_torchs_adamw(*args: Any) -> list[str]:
    with torchs_own_adam():
        return _switch_to_adamw(*args)[1]


def test_torchs_own_adamw_goes_on_from_muon(tmp_path: Path) -> None:
    """Megatron itself cannot resume with it in most formats."""
    _check_to_adamw(_to_torchs_adamw, "dp3", formats()[0], tmp_path)


def _check_to_adamw(switched: Any, shape: str, format: str, folder: Path) -> None:
    case, topology = SHAPES[shape]
    adam = replace(case, optimizer="adam")
    for unlike in on_ranks(switched, adam, topology, format, folder):
        assert unlike == []


def _saved_and_loaded(bucket_size: int, folder: Path) -> tuple[bool, str]:
    """Whether AdamW after Muon loads what it has saved, and what the save prints."""
    format, topology = (
        "fully_reshardable",
        Topology(dp=3, overlap=True, bucket_size=bucket_size),
    )
    save_new(MUON, topology, format, f"{folder}/muon")
    built = start(ADAM, topology)
    with reading_the_other(built):
        load(built, f"{folder}/muon", format)
    _, printed = printed_by(lambda: save(built, f"{folder}/adamw", format))
    again = start(ADAM, topology)
    go_on_after_muon(again.optimizer, asdict(MUON.settings))
    _, by_load = printed_by(lambda: load(again, f"{folder}/adamw", format))
    assert by_load == ""
    return not unequal(held(built), held(again), "by loading: ", log=False), printed


@pytest.mark.skipif(
    "fully_reshardable" not in formats(), reason="Megatron has it from 0.15 on"
)
@pytest.mark.parametrize("bucket_size", [10_007, 10**9])
def test_a_save_that_megatron_shifts_prints_a_warning(
    bucket_size: int, tmp_path: Path
) -> None:
    """AdamW's own, which the plugin leaves as it is: with several padded buckets before
    0.20.
    """
    by_rank = run(_saved_and_loaded, 3, bucket_size, tmp_path)
    is_right = all(right for right, _ in by_rank)
    assert is_right is (bucket_size > 10_007 or VERSION >= (0, 20))
    assert ("warning: fully_reshardable" in by_rank[0][1]) is not is_right
    assert is_right or "--ddp-num-buckets 1" in by_rank[0][1]
    assert [printed for _, printed in by_rank[1:]] == ["", ""]


def _clips_after_muon(folder: Path) -> int:
    """How often a step of AdamW with QK-Clip clips, once it has read Muon's
    checkpoint.
    """
    from megatron_muon.mcore.qk_clip.clip import QkClip

    save_new(MUON, ONE, "torch", folder)
    built = start(ADAM.with_muon(qk_clip=100.0), ONE, plugin=True)
    with reading_the_other(built):
        load(built, folder, "torch")
    with mock.patch.object(QkClip, "apply") as clip:
        take_step(built, MUON.steps)
    return clip.call_count


@pytest.mark.skipif(
    te_on_cpu.TE is not None, reason="its attention keeps no maximum of logits"
)
def test_adamw_after_muon_still_clips_logits(tmp_path: Path) -> None:
    assert run(_clips_after_muon, 1, tmp_path) == [1]
