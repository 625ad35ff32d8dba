"""Muon through Megatron's own forward, backward and schedules, in every parallelism: it
learns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from support.runs.cases import Case, Topology
from support.runs.topologies import ONE
from support.runs.training import MODEL, U, differences, said, spread, trained, truth

BF16 = replace(MODEL, bf16=True, optimizer="muon", steps=4)
MOE = replace(BF16, moe=True)
DEEP = replace(BF16, layers=4)
FP32 = replace(BF16, bf16=False).with_muon(ns_dtype="fp32")


@pytest.mark.parametrize(
    "m, t",
    [
        (BF16, spread("")),
        (BF16, spread("tp2 pp2 dp2 overlap")),
        (BF16, spread("cp2")),
        (BF16, spread("tp2 cp2 pp2")),
        (MOE, spread("dp2 ep2")),
        (MOE, spread("tp2 ep2 alltoall")),
        (MOE, spread("tp2 dp2 ep2 etp2 alltoall")),
        (MOE, spread("cp2 ep2")),
        (MOE, spread("pp2 dp4 ep2 overlap")),
        (
            replace(MOE, grouped="legacy"),
            spread("tp2 dp2 ep2 etp2 alltoall"),
        ),
        (DEEP, spread("pp2 chunks2 dp2 overlap")),
        (DEEP, spread("pp2 chunks2 dp2 overlap step_overlap")),
        (BF16, spread("dp4 instances2 overlap")),
        (MOE, spread("dp4 ep2 instances2")),
        (replace(BF16, mla="column"), spread("tp2 dp2")),
        (replace(BF16, mtp=True), spread("pp2 dp2")),
        (replace(BF16, recompute=True, dropout=0.1), spread("tp2")),
    ],
    ids=said,
)
def test_the_loss_falls_with_each_step(m: Case, t: Topology) -> None:
    trained(m, t)


@pytest.mark.parametrize("t", [spread("dp2"), spread("tp2 pp2 dp2 overlap")], ids=said)
def test_fp32_training_is_that_of_one_process(t: Topology) -> None:
    """But for the order of sums, as ``test_cpu_parallel`` has it with AdamW."""
    one = truth(FP32)
    other = trained(FP32, t)
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


@pytest.mark.parametrize("t", [spread("dp2 ep2"), spread("tp2 ep2 alltoall")], ids=said)
def test_biases_of_experts_train_as_in_one_process(t: Topology) -> None:
    """Megatron by itself adds up those of different experts over TP ranks."""
    one = trained(BIASES, ONE, no_views)
    other = trained(BIASES, t)
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
    "plain, overlapped, how",
    [
        (spread("dp2"), spread("dp2 overlap"), reduce_alone),
        (spread("dp2"), spread("dp2 overlap"), nullcontext),
        (
            spread("pp2 chunks2 dp2"),
            spread("pp2 chunks2 dp2 overlap"),
            nullcontext,
        ),
        (
            spread("pp2 chunks2 dp2"),
            spread("pp2 chunks2 dp2 overlap step_overlap"),
            nullcontext,
        ),
        (spread("dp2 ep2"), spread("dp2 ep2 overlap"), nullcontext),
        (spread("cp2"), spread("cp2 overlap"), nullcontext),
    ],
    ids=lambda value: said(value) if isinstance(value, Topology) else value.__name__,
)
def test_overlap_does_not_change_a_run(
    plain: Topology, overlapped: Topology, how: Callable[[], Any]
) -> None:
    """Bitwise: a sum of two ranks has one order, and the clip, whose norm has many, is
    off.
    """
    m = replace(MOE if plain.ep > 1 else DEEP, clip=0.0)
    one = trained(m, plain)
    other = trained(m, overlapped, how)
    assert one.losses == other.losses
    assert set(differences(one, other).values()) == {0.0}
