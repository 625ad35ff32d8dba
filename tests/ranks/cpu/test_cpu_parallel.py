"""Megatron's own parallel training on gloo ranks equals one process, and the loss falls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import megatron_muon.cpu as cpu
from megatron_muon.cpu import attention
from support.models.parallel_model import Model, Topology
from support.parallel import U, differences, trained, truth

pytestmark = pytest.mark.skipif(not cpu.enabled(), reason="a GPU is here, so cpu is not enabled")

# Ranks and one process differ in fp32 by the order of sums. A sum of up to 128 terms is off by
# about sqrt(128) u = 11 u of its size. In forward and backward of four layers about 2 × (4 × 5 + 1)
# products follow each other, and independent errors add as squares: 11 u × sqrt(42) = 73 u.
REDUCTION = 80 * U
DENSE, DEEP, MOE, SHARED = Model(), Model(layers=4), Model(moe=True), Model(moe=True, shared=True)
MTP, MLA = Model(mtp=True), Model(mla=True)


def check(m: Model, t: Topology) -> None:
    """Losses, norms and each gradient equal those of one process but for rounding."""
    expected, found = truth(m), trained(m, t)
    assert found.losses == pytest.approx(expected.losses, rel=REDUCTION)
    assert found.norms == pytest.approx(expected.norms, rel=REDUCTION)
    far = {name: d for name, d in differences(expected, found).items() if d > REDUCTION}
    assert not far


# ---------------------------------------------------------------- each parallelism


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    ("m", "t"),
    [
        (MOE, Topology(dp=2, ep=2)),
        (SHARED, Topology(tp=2, ep=2, pp=2)),
        (SHARED, Topology(tp=2, dp=2, ep=2, etp=2)),
    ],
    ids=str,
)
def test_experts(m: Model, t: Topology, dispatcher: str) -> None:
    check(m, replace(t, dispatcher=dispatcher))


@pytest.mark.parametrize(
    ("m", "t"),
    [
        (DENSE, Topology(cp=2)),
        (DENSE, Topology(cp=4)),
        (DENSE, Topology(tp=2, cp=2, pp=2)),
        (MOE, Topology(cp=2, ep=2)),
        (MLA, Topology(cp=2)),
        (MTP, Topology(cp=2)),
    ],
    ids=str,
)
def test_context_parallel(m: Model, t: Topology) -> None:
    check(m, t)


@pytest.mark.parametrize(
    "t",
    [
        Topology(dp=4, instances=2),
        Topology(dp=4, instances=2, overlap=True),
        Topology(dp=4, ep=2, instances=2, overlap=True),
    ],
    ids=str,
)
def test_several_optimizer_instances(t: Topology) -> None:
    check(MOE if t.ep > 1 else DENSE, t)


@pytest.mark.parametrize(
    "t",
    [
        Topology(pp=2, vpp=2),
        Topology(pp=2, vpp=2, dp=2, overlap=True),
        Topology(pp=2, vpp=2, dp=2, overlap=True, with_step=True),
    ],
    ids=str,
)
def test_virtual_pipeline(t: Topology) -> None:
    check(DEEP, t)


@pytest.mark.parametrize(
    ("m", "t"),
    [
        (MTP, Topology(tp=2, dp=2)),
        (MTP, Topology(pp=2)),
        (MLA, Topology(pp=2, dp=2)),
        (Model(recompute=True), Topology(tp=2, dp=2)),
    ],
    ids=str,
)
def test_other_models(m: Model, t: Topology) -> None:
    check(m, t)


def test_multi_latent_attention_trains_over_tensor_parallel_ranks() -> None:
    """Not compared with one process: with the local spec Megatron does not sum the gradient of the
    keys' positional part over the ranks (multi_latent_attention.py:596), on a GPU either."""
    trained(MLA, Topology(tp=2))


def test_recompute_repeats_the_dropout() -> None:
    plain, t = Model(moe=True, dropout=0.1), Topology(tp=2, ep=2, dispatcher="alltoall")
    one, other = trained(plain, t), trained(replace(plain, recompute=True), t)
    assert one.losses == other.losses and one.norms == other.norms
    assert set(differences(one, other).values()) == {0.0}
    assert one.losses != trained(replace(plain, dropout=0.0), t).losses


# ---------------------------------------------------------------- half precision


@pytest.mark.parametrize(
    "t", [Topology(dp=2, ep=2), Topology(tp=2, dp=2, ep=2, etp=2, dispatcher="alltoall")], ids=str
)
def test_grouped_experts_equal_sequential_ones(t: Topology) -> None:
    """In bf16, which the GroupedMLP asks for. The products are the same but for the order of fp32
    sums, which may turn one rounding to bf16 (2^-9) in each of up to 22 products in a row."""
    sequential = Model(moe=True, dtype=torch.bfloat16)
    one, other = trained(sequential, t), trained(replace(sequential, grouped=True), t)
    assert other.losses == pytest.approx(one.losses, rel=22 * 2.0**-9)
    assert max(differences(one, other).values()) <= 22 * 2.0**-9


def test_fp16_skips_steps_until_the_loss_scale_fits() -> None:
    log = trained(Model(dtype=torch.float16, loss_scale=2.0**20, steps=8), Topology(tp=2, dp=2)).log
    ok, scales = log["ok"], log["scales"]
    assert not ok[0] and ok[-1]
    for before, after, stepped in zip(scales, scales[1:], ok, strict=False):
        assert after == (before if stepped else before / 2)


# ---------------------------------------------------------------- the comparison notices


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def chunks_in_order() -> Any:
    """Each rank takes its tokens for neighbours, so masks and keys are out of place."""
    return _changed(attention, "chunks", lambda size, rank: (2 * rank, 2 * rank + 1))


def keys_without_the_others_gradient() -> Any:
    """The gathered keys' gradient is cut, not summed."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings.gather_from_sequence_parallel_region
    cut = partial(gather, tensor_parallel_output_grad=False)
    return _changed(mappings, "gather_from_sequence_parallel_region", cut)


@pytest.mark.parametrize("mutation", [chunks_in_order, keys_without_the_others_gradient])
def test_mutants_of_the_context_parallel_attention_are_noticed(mutation: Any) -> None:
    found = trained(DENSE, Topology(cp=2), mutation)
    worst = max(differences(truth(DENSE), found).values())
    assert worst > 100 * REDUCTION
