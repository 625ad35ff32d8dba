"""Train tiny GPTs with Megatron's own parallelisms on gloo ranks, and put the gradients together.

``trained(model, topology)`` is from the test's process, ``truth(model)`` the same on one rank.
"""

import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch

import megatron_muon
from support.models.parallel_model import (
    LENGTH,
    SEQUENCES,
    VOCABULARY,
    Model,
    Piece,
    Topology,
    make_config,
    make_gpt,
    pieces,
    set_weights,
)
from support.ranks import run

Array = Any
U = 2.0**-24  # fp32 unit roundoff
TRAINED: list[tuple[Model, Topology]] = []  # by ``trained``, for the table
MICROBATCHES = 4  # over all data-parallel ranks


def _chunk(m: Model, t: Topology, config: Any, number: int) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    gpt = make_gpt(m, t, config, number)
    set_weights(gpt, t)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=t.overlap,
        overlap_param_gather=t.overlap,
        num_distributed_optimizer_instances=t.instances,
        bucket_size=20_000,  # several buckets where the reduction overlaps
        grad_reduce_in_fp32=True,
    )
    half = m.dtype is not torch.float32
    return DistributedDataParallel(
        config,
        ddp,
        Float16Module(config, gpt) if half else gpt,
        disable_bucketing=number > 0 or t.with_step,
    )


def _optimizer(m: Model, t: Topology, chunks: list[Any]) -> Any:
    from megatron.core import optimizer as mcore_optimizer
    from megatron.core.optimizer import OptimizerConfig

    config = OptimizerConfig(
        optimizer=m.optimizer,
        lr=1e-2,
        bf16=m.dtype is torch.bfloat16,
        fp16=m.dtype is torch.float16,
        initial_loss_scale=m.loss_scale,
        hysteresis=1,
        params_dtype=m.dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=t.overlap,
        overlap_param_gather_with_optimizer_step=t.with_step,
        clip_grad=m.clip,
        adam_eps=1e-4,
    )
    megatron_muon.install()
    try:
        return mcore_optimizer.get_megatron_optimizer(config, chunks)
    finally:
        megatron_muon.uninstall()


def _connect(t: Topology, chunks: list[Any], optimizer: Any) -> None:
    """What megatron.training sets on the configuration before its loop."""
    from megatron.core.distributed import finalize_model_grads

    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if t.overlap:
        several = len(chunks) > 1
        config.no_sync_func = [c.no_sync for c in chunks] if several else chunks[0].no_sync
        config.grad_sync_func = [c.start_grad_sync for c in chunks]
        config.param_sync_func = [c.start_param_sync for c in chunks]
        if not several:
            config.grad_sync_func = config.grad_sync_func[0]
            config.param_sync_func = config.param_sync_func[0]


# ---------------------------------------------------------------- training


def _forward(batches: Any, model: Any) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = next(batches)
    whole = torch.arange(LENGTH).expand(len(tokens), LENGTH)
    # MTP divides by each rank's own number of tokens, and of its rolled sequence the last is not
    # one: leave out one of the other context-parallel rank's as well
    counted = (torch.arange(LENGTH) != 6).float().expand(len(tokens), LENGTH)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": whole}
    batch["counted"] = counted
    given = {"is_hybrid_cp": False, "cp_group": ps.get_context_parallel_group()}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters  # from core 0.19 on these, too
    batch = get_batch_on_this_cp_rank(
        {k: v.contiguous() for k, v in batch.items()},
        **{name: value for name, value in given.items() if name in known},
    )

    def loss(per_token: torch.Tensor) -> Any:
        total = per_token.float().sum()
        count = torch.tensor(per_token.numel(), dtype=torch.int)
        return total, count, {"loss": (total / count).detach().clone()}

    labels, mask = batch["labels"], batch["counted"]
    return model(batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask), loss


def _batches() -> Any:
    from megatron.core import parallel_state as ps

    g = torch.Generator().manual_seed(3)
    shape = (MICROBATCHES, SEQUENCES, LENGTH + 1)
    data = torch.randint(0, VOCABULARY, shape, generator=g)
    return data.chunk(ps.get_data_parallel_world_size())[ps.get_data_parallel_rank()]


@torch.no_grad()
def _gradients(chunks: list[Any], t: Topology) -> list[tuple[Piece, Array]]:
    """The reduced gradients as this rank has them: NaN where another rank owns the shard."""
    found = []
    for chunk in chunks:
        kept = {}
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                kept[bucket] = bucket.grad_data.clone()
                for rank, shard in enumerate(bucket.grad_data.view(group.size(), -1)):
                    if rank != group.rank():
                        shard.fill_(float("nan"))
        gpt = chunk.module.module if hasattr(chunk.module, "module") else chunk.module
        params = dict(gpt.named_parameters())
        for piece in pieces(gpt, t):
            grad = piece.view(params[piece.parameter].main_grad)
            found.append((piece, grad.float().numpy().copy()))
        for bucket, values in kept.items():
            bucket.grad_data.copy_(values)
    return found


def train(m: Model, t: Topology, mutation: Callable[[], Any] = nullcontext) -> dict[str, Any]:
    """Losses (none before the last stage), norms, scales, and the first step's gradients."""
    with mutation():
        return _trained_here(m, t)


def _trained_here(m: Model, t: Topology) -> dict[str, Any]:
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ps.initialize_model_parallel(
        t.tp,
        t.pp,
        virtual_pipeline_model_parallel_size=t.vpp if t.vpp > 1 else None,
        context_parallel_size=t.cp,
        expert_model_parallel_size=t.ep,
        expert_tensor_parallel_size=t.etp,
        num_distributed_optimizer_instances=t.instances,
    )
    model_parallel_cuda_manual_seed(1)
    config = make_config(m, t)
    chunks = [_chunk(m, t, config, number) for number in range(t.vpp)]
    optimizer = _optimizer(m, t, chunks)
    _connect(t, chunks, optimizer)
    batches = _batches()
    log: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "ok": []}
    for step in range(m.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        out = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in chunks] if t.vpp > 1 else iter(batches),
            model=chunks if t.vpp > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        if step == 0:
            log["gradients"] = _gradients(chunks, t)
        log["scales"].append(float(optimizer.get_loss_scale()))
        ok, norm, _ = optimizer.step()
        log["ok"].append(ok)
        log["norms"].append(norm)
        log["losses"].append(torch.stack([o["loss"] for o in out]).mean().item() if out else None)
    return log


# ---------------------------------------------------------------- comparing, in the test


@dataclass(frozen=True)
class Whole:
    """A run put together: mean losses, norms, and the first gradients in one-process form."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Array]
    log: dict[str, Any]


def _merged(parts: list[tuple[Piece, Array]]) -> Array:
    """One tensor from the pieces of all ranks; where several ranks own an element, they agree."""
    slices: dict[int, Array] = {}
    for piece, array in parts:
        before = slices.setdefault(piece.rank if piece.dim is not None else 0, array.copy())
        both = ~numpy.isnan(before) & ~numpy.isnan(array)
        assert numpy.array_equal(before[both], array[both]), piece.name
        before[numpy.isnan(before)] = array[numpy.isnan(before)]
    piece = parts[0][0]
    assert len(slices) == (piece.size if piece.dim is not None else 1)
    ordered = [slices[rank] for rank in sorted(slices)]
    if len(ordered) > 1 and "fc1" in piece.name:
        ordered = [half for i in (0, 1) for half in (numpy.split(s, 2)[i] for s in ordered)]
    whole = numpy.concatenate(ordered, piece.dim or 0)
    assert numpy.isfinite(whole).all(), piece.name
    return whole


def trained(m: Model, t: Topology, mutation: Callable[[], Any] = nullcontext) -> Whole:
    """Run it on real ranks, and check that the ranks agree and the loss falls with each update."""
    ranks = run(train, t.world_size, m, t, mutation)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"] and rank["scales"] == ranks[0]["scales"]
    last = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
    assert len(last) == t.world_size // t.pp
    losses = [sum(at) / len(at) for at in zip(*last, strict=True)]
    parts: dict[str, list[tuple[Piece, Array]]] = {}
    for rank in ranks:
        for piece, array in rank["gradients"]:
            parts.setdefault(piece.name, []).append((piece, array))
    gradients = {}
    if ranks[0]["ok"][0]:  # else they are infinite, which the loss scale is for
        gradients = {name: _merged(found) for name, found in parts.items()}
    for (before, after), ok in zip(itertools.pairwise(losses), ranks[0]["ok"], strict=False):
        assert after < before if ok else after == before, losses
    TRAINED.append((m, t))
    return Whole(losses, ranks[0]["norms"], gradients, ranks[0])


@cache
def truth(m: Model) -> Whole:
    """The same on one process."""
    return trained(m, Topology())


def differences(a: Whole, b: Whole) -> dict[str, float]:
    """Relative Frobenius distance of each gradient."""
    assert a.gradients.keys() == b.gradients.keys()
    return {
        name: float(numpy.linalg.norm(b.gradients[name] - grad) / numpy.linalg.norm(grad))
        for name, grad in a.gradients.items()
    }
