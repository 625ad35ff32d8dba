"""What a run cost: times, and the bytes and flops of every rank. Nothing here runs in
the step.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

WARM_UP_STEPS = 5  # left out of the medians: first-touch memory, lazy gloo connections


def adamw_bytes(model: DistributedDataParallel) -> int:
    """Bytes this rank sends per step for what AdamW needs too.

    A ring reduce-scatter of the gradients and a ring all-gather of the parameters each
    send (dp - 1) / dp of the buffer.
    """
    total = 0
    for buffer in model.buffers + model.expert_parallel_buffers:
        dp_size = buffer.data_parallel_world_size
        item = buffer.grad_dtype.itemsize + buffer.param_dtype.itemsize
        total += buffer.numel * item * (dp_size - 1) // dp_size
    return total


def state_bytes(optimizer: MegatronOptimizer) -> int:
    """Measured bytes of this rank's fp32 main parameters and of every optimizer state
    tensor.
    """
    tensors: dict[int, torch.Tensor] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            tensors.update((id(param), param) for param in group["params"])
        for state in part.optimizer.state.values():
            tensors.update(
                (id(v), v) for v in state.values() if isinstance(v, torch.Tensor)
            )
    return sum(tensor.nbytes for tensor in tensors.values())


def muon_figures(optimizer: MegatronOptimizer, chosen: str) -> dict[str, int]:
    """Matrices, Newton-Schulz flops and exchange bytes of this rank in the last
    step.
    """
    if chosen != "muon":
        return {"matrices": 0, "ns_flops": 0, "sent_bytes": 0}
    import megatron_muon

    meter = megatron_muon.meter(optimizer)
    return {
        "matrices": meter.matrices,
        "ns_flops": meter.ns_flops,
        "sent_bytes": meter.sent_bytes,
    }


def main_matrices(model: DistributedDataParallel) -> list[torch.Tensor]:
    """A copy of this rank's fp32 main parameters of the layers' matrices, Muon's with
    either.
    """
    return [
        param.main_param.detach().clone()
        for name, param in model.named_parameters()
        if ".layers." in name and param.ndim == 2 and param.main_param is not None
    ]


def update_rms(
    before: list[torch.Tensor],
    model: DistributedDataParallel,
    lr: float,
    weight_decay: float,
) -> float:
    """Root mean square, over all elements, of what a step took off matrices, per unit
    of ``lr``.

    Decoupled decay is left out: u = (W_before · (1 - lr · decay) - W_after) / lr.
    """
    after = main_matrices(model)
    kept = 1 - lr * weight_decay
    squares = sum(
        float((kept * old.double() - new.double()).square().sum())
        for old, new in zip(before, after, strict=True)
    )
    return (squares / sum(old.numel() for old in before)) ** 0.5 / lr


def collect(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    chosen: str,
    step_seconds: list[float],
    optimizer_seconds: list[float],
) -> dict[str, Any]:
    """The cost figures of the whole run, the same on every rank (a collective call).

    ``step_ms``: median over steps on the slowest rank. ``optimizer_ms``: median time
    inside ``optimizer.step()`` on the rank that waits least there for ranks still in
    their backward pass.
    """
    mine = {
        "step_ms": 1e3
        * statistics.median(step_seconds[WARM_UP_STEPS:] or step_seconds),
        "optimizer_ms": 1e3
        * statistics.median(optimizer_seconds[WARM_UP_STEPS:] or [0.0]),
        "state_bytes": state_bytes(optimizer),
        "adamw_bytes": adamw_bytes(model),
        **muon_figures(optimizer, chosen),
    }
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, mine)
    return {
        "step_ms": round(max(rank["step_ms"] for rank in ranks), 2),
        "optimizer_ms": round(min(rank["optimizer_ms"] for rank in ranks), 2),
        "state_bytes_per_rank": [rank["state_bytes"] for rank in ranks],
        "exchange_bytes_per_rank": [rank["sent_bytes"] for rank in ranks],
        "adamw_bytes_per_rank": [rank["adamw_bytes"] for rank in ranks],
        "ns_flops_per_rank": [rank["ns_flops"] for rank in ranks],
        "matrices": sum(rank["matrices"] for rank in ranks),
    }


def largest_logit(model: DistributedDataParallel, device: torch.device) -> float:
    """The largest attention logit of the step that was just taken, of all ranks.

    As Megatron-LM's training loop logs it: megatron-core 0.16 has ``clip_qk``.
    """
    from megatron.core.optimizer import qk_clip

    largest = torch.tensor(qk_clip.clip_qk([model], log_max_only=True), device=device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return largest.item()
