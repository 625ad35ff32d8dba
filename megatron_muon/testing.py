"""A check of a rule of one's own, for tests: on CPUs, without Megatron."""

from __future__ import annotations

import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from megatron_muon.orthogonalize.matmul import numerics_on
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.grid import RankGrid
from megatron_muon.planning.layout import Parameter, Span
from megatron_muon.planning.plan import ExchangePlan, make_plan
from megatron_muon.planning.sections import whole_matrix
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.rules.own import tried
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.states import States
from megatron_muon.runtime.tracing import phases
from megatron_muon.settings.config import MuonConfig

_CPU = torch.device("cpu")
# Shapes of whole weights, and the dim that TP cuts; three of one shape are a batch.
_WEIGHTS: tuple[tuple[tuple[int, int], int | None], ...] = (
    ((64, 48), 0),
    ((48, 64), 1),
    ((64, 48), 0),
    ((40, 40), 1),
    ((64, 48), None),
)
Shards = dict[int, Tensor]  # flat, by the number of the weight


def assert_as_one_process(
    rule: str, *, tp: int = 2, dp: int = 2, steps: int = 3, tolerance: float = 1e-5
) -> None:
    """Take steps on ``tp * dp`` processes and on one, and compare the weights.

    Processes are spawned: call it from a test, or below ``if __name__ == "__main__"``.

    Args:
        rule: ``module:name``, which each process imports.
        tp: the size of TP, which cuts weights.
        dp: the size of DP, which cuts shards.
        steps: the number of steps, with the same random gradients on both.
        tolerance: the largest difference of an element, relative or absolute; products
            of other batches round differently in fp32.

    Raises:
        AssertionError: weights differ by more.
        ValueError: the rule would be refused at a run's start.
    """
    numerics = numerics_on(_CPU, MuonConfig(rule=rule, ns_dtype="fp32"))
    tried(numerics, (), _CPU)
    alone, *_ = _trained(numerics, 1, 1, steps)
    wholes = [alone[at].view(shape) for at, (shape, _) in enumerate(_WEIGHTS)]
    plan = _plan_of(numerics, tp, dp)
    for rank, shards in enumerate(_trained(numerics, tp, dp, steps)):
        expected = _cut(wholes, plan, rank)
        torch.testing.assert_close(shards, expected, rtol=tolerance, atol=tolerance)


def _trained(numerics: Numerics, tp: int, dp: int, steps: int) -> list[Shards]:
    """The weights' shards of each process after the steps."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else it resolves the host name
    with tempfile.TemporaryDirectory() as folder:
        arguments = numerics, tp, dp, steps, folder
        spawn(_train, arguments, nprocs=tp * dp)  # type: ignore[no-untyped-call]
        return [torch.load(Path(folder, str(rank))) for rank in range(tp * dp)]


def _train(
    rank: int, numerics: Numerics, tp: int, dp: int, steps: int, folder: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp * dp
    )
    plan = _plan_of(numerics, tp, dp)
    own = plan.for_rank(rank)
    world = dist.group.WORLD
    assert world is not None
    exchange = Exchange(own, plan.matrices, world, torch.float32, _CPU, Meter())
    shards = _cut(_drawn(0), plan, rank)
    muon = DistributedMuon(numerics, plan, exchange, shards, phases())
    states = States(SimpleNamespace(state=defaultdict(dict)))
    group = {"params": list(shards.values()), "lr": 0.05, "weight_decay": 0.1}
    for step in range(steps):
        for number, grad in _cut(_drawn(1 + step), plan, rank).items():
            shards[number].grad = grad
        muon.step([group], states, lambda: None)
    torch.save(shards, Path(folder, str(rank)))
    dist.destroy_process_group()


def _plan_of(numerics: Numerics, tp: int, dp: int) -> ExchangePlan:
    ranks = torch.arange(tp * dp).view(tp, dp).tolist()
    grid = RankGrid((tuple(map(tuple, ranks)),))
    return make_plan(_parameters(tp, dp), grid, numerics)


def _parameters(tp: int, dp: int) -> list[Parameter]:
    """The weights, all in one bucket, which shards cut anywhere."""
    elements = sum(math.prod(shape) for shape, _ in _WEIGHTS)
    bucket = Span(0, math.ceil(elements / (tp * dp)) * tp * dp)
    parameters: list[Parameter] = []
    start = 0
    for number, (whole, dim) in enumerate(_WEIGHTS):
        local = list(whole)
        if dim is not None:
            local[dim] //= tp
        shape = (local[0], local[1])
        span = Span(start, start + math.prod(shape))
        start = span.stop
        name = f"weight {number}"
        of_weight = whole_matrix(name, shape, dim, tp)
        parameters.append(Parameter(name, shape, dim, bucket, span, 0, *of_weight))
    return parameters


def _drawn(seed: int) -> list[Tensor]:
    """A whole random tensor for each weight."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape, _ in _WEIGHTS]


def _cut(wholes: Sequence[Tensor], plan: ExchangePlan, rank: int) -> Shards:
    """A rank's shards of whole tensors."""
    grid = plan.grid
    shards: Shards = {}
    for number, span in plan.for_rank(rank).shards.items():
        local = wholes[number]
        dim = _WEIGHTS[number][1]
        if dim is not None:
            local = local.chunk(grid.tp_size, dim)[rank // grid.dp_size]
        shards[number] = local.flatten()[span.start : span.stop].clone()
    return shards
