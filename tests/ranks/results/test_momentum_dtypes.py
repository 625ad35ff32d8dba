"""--muon-momentum-dtype int8: fewer bytes an element, bitwise the same after a save and a
load.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_muon.rules import int8_momentum as in_blocks
from megatron_muon.rules.int8_momentum import BLOCK, MOST_OFF, InBlocks
from megatron_muon.rules.muon import MOMENTUM_KEY
from support import te_on_cpu
from support.checkpoints import sealing
from support.checkpoints.inspecting import inspect
from support.checkpoints.resharding import resharded
from support.checkpoints.resuming import check as check_resumed
from support.checkpoints.saving import formats
from support.marks import in_each_format
from support.models.clipped import clipped, clipped_whole
from support.models.gpt import (
    ON_HOST,
    Case,
    Topology,
    muon_weights,
    on_ranks,
    stepped,
    trained,
    truth,
)
from support.ranks import run
from support.runs.topologies import DP2, DP3, ONE, TP2_DP2_SP, TP2_SP
from support.runs.watching import logged
from support.runs.whole import differences, whole

PLAIN = Case()
INT8 = PLAIN.with_muon(momentum_dtype="int8")
SP = {"sequence_parallel": True}


class _Adam:
    def __init__(self, shard: Tensor) -> None:
        self.state: dict[Tensor, dict[str, Tensor]] = {shard: {}}


@given(st.integers(1, 3 * BLOCK), st.integers(0, 2 * BLOCK), st.integers(0, 1 << 20))
def test_an_element_is_near_and_a_second_rounding_changes_no_bit(
    size: int, first: int, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    exact = (
        torch.randn(size, generator=numbers) * torch.rand(size, generator=numbers) ** 8
    )
    states = InBlocks(_Adam(exact), {id(exact): first})
    states.start_state(exact, (MOMENTUM_KEY,))
    assert not states.get(exact, "exp_avg").any()
    with mock.patch.object(in_blocks, "AT_ONCE", BLOCK):
        states.put(exact, "exp_avg", exact.clone())
        once = states.get(exact, "exp_avg")
    states.put(exact, "exp_avg", once.clone())
    assert torch.equal(once, states.get(exact, "exp_avg"))
    blocks = (torch.arange(size) + first % BLOCK) // BLOCK
    for block in blocks.unique():
        here = blocks == block
        assert (once - exact)[here].abs().max() <= MOST_OFF * exact[
            here
        ].abs().max() * (1 + 1e-6)


def test_a_load_of_tensors_without_values_keeps_the_momentum() -> None:
    shard = torch.randn(3 * BLOCK)
    adam: Any = _Adam(shard)
    adam.param_groups = [{"params": [shard]}]
    states = InBlocks(adam, {id(shard): 0})
    states.start_state(shard, (MOMENTUM_KEY,))
    states.put(shard, "exp_avg", shard.clone())
    before = states.get(shard, "exp_avg")
    empty = {
        "exp_avg": torch.empty(3 * BLOCK),
        "exp_avg_sq": shard,
        "step": torch.tensor(1.0),
    }
    load = lambda given: adam.state.update({shard: dict(given["state"][0])})  # noqa: E731
    states.load(load, {"param_groups": [{"params": [0]}], "state": {0: empty}})
    assert (
        torch.equal(states.get(shard, "exp_avg"), before)
        and len(adam.state[shard]) == 2
    )


def test_newton_schulz_gets_the_momentum_before_it_is_rounded() -> None:
    plain = truth(replace(PLAIN, steps=1))
    later = truth(PLAIN)
    one = truth(replace(INT8, steps=1))
    both = truth(INT8)
    assert differences({"main": plain["main"]}, {"main": one["main"]}) == []
    for name in muon_weights(INT8):
        rounded, exact = one["exp_avg"][name], plain["exp_avg"][name]
        assert not torch.equal(rounded, exact), name
        off = MOST_OFF * exact.abs().max()
        assert ((rounded - exact).abs() <= off).all(), name
    # by the second step
    assert differences({"main": later["main"]}, {"main": both["main"]})


@pytest.mark.parametrize(
    "topology", [Topology(2, 2, 1, overlap=True, **SP), DP3, Topology(tp=2, pp=2, **SP)]
)
def test_a_layout_changes_only_what_a_block_at_an_edge_rounds_to(
    topology: Topology,
) -> None:
    """Two roundings of a block lie at most twice the bound apart; steps carry that
    on.
    """
    one, other = (
        {
            name: values
            for name, values in made["exp_avg"].items()
            if name in muon_weights(INT8)
        }
        for made in (
            truth(replace(INT8, steps=1)),
            trained(replace(INT8, steps=1), topology),
        )
    )
    for name, values in one.items():
        assert (
            values - other[name]
        ).abs().max() <= 2 * MOST_OFF * values.abs().max(), name


@in_each_format
def test_a_run_resumes_with_the_same_bits(format: str, tmp_path: Path) -> None:
    check_resumed(INT8, DP2, format, tmp_path)


@pytest.mark.parametrize("at_save, at_load", [(PLAIN, INT8), (INT8, PLAIN)])
def test_a_checkpoint_of_one_dtype_loads_with_the_other(
    at_save: Case, at_load: Case, tmp_path: Path
) -> None:
    before = TP2_DP2_SP
    (there, _), (here, _) = resharded(at_save, before, at_load, DP2, tmp_path)
    assert differences({"main": there["main"]}, {"main": here["main"]}) == []
    for name in muon_weights(INT8):
        values = there["exp_avg"][name]
        assert (
            values - here["exp_avg"][name]
        ).abs().max() <= MOST_OFF * values.abs().max(), name


_OVER_TE = [
    PLAIN.with_narrow(exp_avg_dtype=torch.bfloat16),
    replace(PLAIN, narrow=(ON_HOST,)),
]


@pytest.mark.parametrize("case", [INT8, *(_OVER_TE if te_on_cpu.TE else ())])
def test_it_is_watched_sealed_and_inspected(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logging step changes no bit; a load of what the digest is of has all bits."""
    topology, folder = TP2_SP, tmp_path / "saved"
    seen, steps = logged(case, topology)
    assert differences(trained(case, topology), seen) == [] and all(steps)
    (format, *_), size = formats(), topology.world_size
    before = run(sealing.saved, size, case, topology, format, folder)
    status, report = inspect(folder, capsys, "--hash")
    assert status == 0, report["faults"]
    assert sorted(report["matrices"]) == sorted(muon_weights(case))
    after = run(sealing.loaded, size, case, topology, format, folder)
    assert [each["error"] for each in after] == [None, None]
    assert differences(whole(before), whole([each["held"] for each in after])) == []


@pytest.mark.skipif(
    te_on_cpu.TE is not None, reason="its attention has no logits to read"
)
def test_a_clip_of_logits_scales_weights_alone() -> None:
    case = replace(INT8, steps=3).with_muon(qk_clip=100.0)
    by_hand = whole(run(clipped_whole, 1, case, torch.float32, True))
    clip = on_ranks(clipped, case, ONE, torch.float32)
    assert differences(by_hand, whole(clip)) == []
    assert differences(truth(case), by_hand)  # it was clipped


def _bytes(case: Case) -> float:
    built = stepped(case, DP2, 1)
    held = elements = 0
    for part in built.parts:
        for shard in part.muon.main_params.values():
            held += sum(each.nbytes for each in part.optimizer.state[shard].values())
            elements += shard.numel()
    return held / elements


def test_bytes_an_element() -> None:
    least = 1 + 4 / BLOCK
    for held in run(_bytes, 2, INT8):
        assert least <= held <= least + 0.035  # a step count of 4 bytes, too
