"""Muon through Megatron's own forward, backward and schedules, in every parallelism: it
learns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from support.runs.training import MODEL, U, differences, rows, trained, truth

BF16 = replace(MODEL, bf16=True, optimizer="muon", steps=4)
MOE = replace(BF16, moe=True)
DEEP = replace(BF16, layers=4)
FP32 = replace(BF16, bf16=False).with_muon(ns_dtype="fp32")


CASES = {
    "dense": BF16,
    "moe": MOE,
    "legacy": replace(MOE, grouped="legacy"),
    "deep": DEEP,
    "mla": replace(BF16, mla="column"),
    "mtp": replace(BF16, mtp=True),
    "recompute": replace(BF16, recompute=True, dropout=0.1),
}


@pytest.mark.parametrize(
    "name, ranks",
    rows(
        """
        dense: dp1
        dense: tp2 pp2 dp2 overlap
        dense: cp2
        dense: tp2 cp2 pp2
        dense: dp4 instances2 overlap
        moe: dp2 ep2
        moe: tp2 ep2 alltoall
        moe: tp2 dp2 ep2 etp2 alltoall
        moe: cp2 ep2
        moe: pp2 dp4 ep2 overlap
        moe: dp4 ep2 instances2
        legacy: tp2 dp2 ep2 etp2 alltoall
        deep: pp2 chunks2 dp2 overlap
        deep: pp2 chunks2 dp2 overlap step_overlap
        mla: tp2 dp2
        mtp: pp2 dp2
        recompute: tp2
        """
    ),
)
def test_the_loss_falls_with_each_step(name: str, ranks: str) -> None:
    trained(CASES[name], ranks)


@pytest.mark.parametrize("ranks", ["dp2", "tp2 pp2 dp2 overlap"])
def test_fp32_training_is_that_of_one_process(ranks: str) -> None:
    """But for the order of sums, as ``test_cpu_parallel`` has it with AdamW."""
    one = truth(FP32)
    other = trained(FP32, ranks)
    assert max(differences(one, other).values()) < 105 * U
    assert other.losses == pytest.approx(one.losses, rel=105 * U)


BIASES = replace(FP32, moe=True, shared=False, expert_biases=True)


@contextmanager
def no_views() -> Iterator[None]:
    """On one process an expert's output is a view, to which Megatron adds the bias in
    place, which torch refuses.
    """
    from megatron.core.tensor_parallel import layers

    name = "reduce_from_tensor_model_parallel_region"
    reduce = getattr(layers, name)
    with mock.patch.object(
        layers, name, lambda *args, **kwargs: reduce(*args, **kwargs).clone()
    ):
        yield


@pytest.mark.parametrize("ranks", ["dp2 ep2", "tp2 ep2 alltoall"])
def test_biases_of_experts_train_as_in_one_process(ranks: str) -> None:
    """Megatron by itself adds up those of different experts over TP ranks."""
    one = trained(BIASES, "alltoall", no_views)
    other = trained(BIASES, ranks)
    far = differences(one, other)
    assert max(far.values()) < 105 * U, max(far, key=lambda name: far[name])
    assert other.losses == pytest.approx(one.losses, rel=105 * U)


@contextmanager
def reduce_alone() -> Iterator[None]:
    """The reduction overlaps, and the gather of parameters does not."""
    from megatron.core import distributed

    class Alone(distributed.DistributedDataParallelConfig):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "overlap_param_gather": False})

    with mock.patch.object(distributed, "DistributedDataParallelConfig", Alone):
        yield


@pytest.mark.parametrize(
    "plain, overlap, how",
    [
        ("dp2", "overlap", reduce_alone),
        ("dp2", "overlap", nullcontext),
        ("pp2 chunks2 dp2", "overlap", nullcontext),
        ("pp2 chunks2 dp2", "overlap step_overlap", nullcontext),
        ("dp2 ep2", "overlap", nullcontext),
        ("cp2", "overlap", nullcontext),
    ],
)
def test_overlap_does_not_change_a_run(
    plain: str, overlap: str, how: Callable[[], Any]
) -> None:
    """Bitwise: a sum of two ranks has one order, and the clip, whose norm has many, is
    off.
    """
    m = replace(MOE if "ep2" in plain else DEEP, clip=0.0)
    one = trained(m, plain)
    other = trained(m, f"{plain} {overlap}", how)
    assert one.losses == other.losses
    assert set(differences(one, other).values()) == {0.0}
