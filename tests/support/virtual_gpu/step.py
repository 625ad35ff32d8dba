"""The real ``DistributedMuon.step`` of one rank of any stage, on a virtual GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import megatron_muon.cpu
from megatron_muon.orthogonalize import matmul, triton_operations
from megatron_muon.orthogonalize.matmul import TORCH_DTYPE
from megatron_muon.orthogonalize.numerics import Numerics
from megatron_muon.planning.plan import ExchangePlan
from megatron_muon.rules import fused
from megatron_muon.rules.hyperball import Hyperball
from megatron_muon.rules.int8_momentum import InBlocks
from megatron_muon.rules.muon import DistributedMuon
from megatron_muon.runtime.exchange.messages import Exchange
from megatron_muon.runtime.exchange.meter import Meter
from megatron_muon.runtime.patches import replaced
from megatron_muon.runtime.states import States
from megatron_muon.runtime.tracing import phases
from megatron_muon.settings.config import MuonConfig
from support.virtual_gpu.device.communication import VirtualNccl
from support.virtual_gpu.device.cuda import on_gpu
from support.virtual_gpu.device.gpu import Gpu
from support.virtual_gpu.device.guard import without_driver
from support.virtual_gpu.device.nccl import alone_as
from support.virtual_gpu.device.tensors import CUDA
from support.virtual_gpu.recording import Recording
from support.virtual_gpu.trace import StepStart, Trace


@contextmanager
def virtual_gpu() -> Iterator[Gpu]:
    """A GPU, switched on, with ``torch.cuda`` and ``torch.distributed`` over it.

    The host reads 0 from every tensor. It has triton, installed here or not: a
    fused kernel is one operation, which is recorded and not run.
    ``MuonConfig.elementwise`` says whether a step has them. It has no quack-kernels.
    """
    gpu = Gpu()
    with ExitStack() as stack:
        stack.enter_context(without_driver())
        stack.enter_context(replaced(triton_operations, has_triton=lambda: True))
        stack.enter_context(replaced(matmul, _quack=lambda: None))
        # a phase is an operation of torch's, as under its profiler
        stack.enter_context(replaced(torch.autograd, _profiler_enabled=lambda: True))
        for part in (without_cpu_runtime(), on_gpu(gpu), VirtualNccl(gpu).in_place()):
            stack.enter_context(part)
        stack.enter_context(_steady_memory())
        stack.enter_context(gpu)
        yield gpu


def record(rank: int, size: int, program: Callable[[Gpu, Any], None]) -> Recording:
    """A program, run as one rank of a world."""
    with virtual_gpu() as gpu, alone_as(rank, size) as group, torch.no_grad():
        program(gpu, group)
        return closed(rank, gpu)


def closed(rank: int, gpu: Gpu, held: Mapping[int, str] | None = None) -> Recording:
    """The trace so far: what is freed later is not in it."""
    return Recording(rank, Trace(list(gpu.trace.events)), held or {})


def record_step(
    plan: ExchangePlan,
    rank: int,
    config: MuonConfig,
    *,
    steps: int = 1,
    hosted: Mapping[str, Any] | None = None,
) -> Recording:
    """The work of ``rank`` in steps of Muon, without AdamW's part.

    With ``hosted``, settings of Megatron's OptimizerConfig, the state is on the host.
    """

    def program(gpu: Gpu, group: Any) -> None:
        dtype = torch.float32 if hosted is None else torch.bfloat16
        muon, groups, states = muon_of(plan, rank, Numerics(config), group, CUDA, dtype)
        if hosted is not None:
            states = _on_host(muon, hosted)
        for _ in range(steps):
            gpu.trace.events.append(StepStart())
            muon.step(groups, states, lambda: None)

    return record(rank, plan.size, program)


def muon_of(
    plan: ExchangePlan,
    rank: int,
    numerics: Numerics,
    group: Any,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[DistributedMuon, Any, Any]:
    """The Muon of a rank, its parameter groups and their state."""
    own = plan.for_rank(rank)
    shards = {
        index: torch.zeros(span.size, device=device, dtype=dtype)
        for index, span in own.shards.items()
    }
    for shard in shards.values():
        shard.grad = torch.ones_like(shard)
    groups = [{"params": list(shards.values()), "lr": 1e-3, "weight_decay": 0.1}]
    exchange = Exchange(
        own, plan.matrices, group, TORCH_DTYPE[numerics.travels], device, Meter()
    )
    tools = phases(), fused.elementwise_on(device, numerics)
    muon = DistributedMuon(numerics, plan, exchange, shards, *tools)
    if isinstance(muon.rule, Hyperball):
        radii: dict[str, float] = {}
        for matrix in plan.matrices:
            radii |= dict.fromkeys(matrix.unit_names, 1.0)
        muon.rule.set_radii(radii)
    if numerics.config.momentum_dtype == "fp32":
        state = {
            shard: {key: torch.zeros_like(shard) for key in muon.rule.state_keys}
            for shard in shards.values()
        }
        return muon, groups, States(SimpleNamespace(state=state, param_groups=groups))
    empty: dict[Tensor, Any] = {shard: {} for shard in shards.values()}
    states = InBlocks.of(SimpleNamespace(state=empty, param_groups=groups), muon)
    for shard in empty:
        states.start_state(shard, muon.rule.state_keys)
    return muon, groups, states


def _on_host(muon: DistributedMuon, hosted: Mapping[str, Any]) -> Any:
    """The state of Muon's shards, where no shard is AdamW's."""
    from megatron_muon.mcore.host.offloaded_states import OfHybrid

    for shard in muon.main_params.values():
        shard.decoupled_grad, shard.grad = (
            torch.ones_like(shard, dtype=torch.float32),
            None,
        )
    states = OfHybrid(SimpleNamespace(state={}, _init_sub_optimizers=lambda: None))
    states.hold(muon, SimpleNamespace(bf16=True, **hosted))
    return states


@contextmanager
def without_cpu_runtime() -> Iterator[None]:
    """Megatron's CPU runtime, where a test session has it on, is off within it."""
    if not megatron_muon.cpu.enabled():
        yield
        return
    megatron_muon.cpu.disable()
    try:
        yield
    finally:
        megatron_muon.cpu.enable(allow_cuda=True, late=True)


@contextmanager
def _steady_memory() -> Iterator[None]:
    """No garbage collection, which would free tensors in cycles at any time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
