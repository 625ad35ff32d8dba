"""Train the tiny GPTs with Megatron's own forward, backward and schedules on gloo
ranks.

``trained(case, ranks)`` is from the test's process, ``truth(case)`` the same on one
rank. Both put the gradients of the first step together.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_muon import numbers
from support.models.gpt import Built, held, on_ranks, start
from support.runs.cases import SEQUENCE, Case, Topology
from support.runs.whole import whole

U = 2.0**-24  # fp32 unit roundoff
SEQUENCES = 2  # in a micro-batch
MICROBATCHES = 4  # over all data-parallel ranks
# Like Llama's. The rate is one with which the loss of each step is below the one
# before.
MODEL = Case(
    bf16=False,
    gated=True,
    rms_norm=True,
    optimizer="adam",
    steps=3,
    lr=1e-2,
    weight_decay=0.01,
    clip=1.0,
    loss_scale=2.0**16,
    scale_window=1000,
    adam_eps=1e-4,
    te_attention=False,  # it has no parameters, and its forward pass needs a GPU
)


def spread(text: str) -> Topology:
    """A topology by its sizes and what it does, as in ``tp2 ep2 overlap alltoall``.

    TP ranks split the sequence too, and experts by themselves.
    """
    topology = Topology.of(text.removesuffix("alltoall"))
    return replace(
        topology,
        etp=topology.etp or 1,
        sequence_parallel=topology.tp > 1,
        dispatcher="alltoall" if "alltoall" in text else "allgather",
        bucket_size=20_000,
    )


def rows(text: str) -> list[list[str]]:
    """The name of a case and a topology of each line, as in ``moe: tp2 ep2``."""
    return [line.strip().split(": ") for line in text.strip().splitlines()]


# --- on every rank --------------------------------------------------------------------


def _connect(built: Built) -> None:
    """What megatron.training sets on the configuration before its loop."""
    from megatron.core.distributed import finalize_model_grads

    chunks, config = built.chunks, built.chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = built.optimizer.scale_loss
    if built.topology.overlap:
        several = len(chunks) > 1
        config.no_sync_func = (
            [c.no_sync for c in chunks] if several else chunks[0].no_sync
        )
        config.grad_sync_func = [c.start_grad_sync for c in chunks]
        config.param_sync_func = [c.start_param_sync for c in chunks]
        if not several:
            config.grad_sync_func = config.grad_sync_func[0]
            config.param_sync_func = config.param_sync_func[0]


def _forward(batches: Any, model: Any) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.utils import get_batch_on_this_cp_rank

    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(tokens), SEQUENCE)
    # MTP divides by each rank's own number of tokens, and of its rolled sequence the
    # last is not one: leave out one of the other context-parallel rank's as well
    counted = (
        (torch.arange(SEQUENCE) != SEQUENCE // 2 - 2)
        .float()
        .expand(len(tokens), SEQUENCE)
    )
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}
    batch["counted"] = counted
    given = {"is_hybrid_cp": False, "cp_group": ps.get_context_parallel_group()}
    known = inspect.signature(
        get_batch_on_this_cp_rank
    ).parameters  # from core 0.19 on these, too
    batch = get_batch_on_this_cp_rank(
        {k: v.contiguous() for k, v in batch.items()},
        **{name: value for name, value in given.items() if name in known},
    )

    def loss(per_token: Tensor) -> Any:
        total = per_token.float().sum()
        count = torch.tensor(per_token.numel(), dtype=torch.int)
        return total, count, {"loss": (total / count).detach().clone()}

    labels, mask = batch["labels"], batch["counted"]
    return model(
        batch["tokens"], batch["positions"], None, labels=labels, loss_mask=mask
    ), loss


def _batches(case: Case) -> Any:
    from megatron.core import parallel_state as ps

    generator = torch.Generator().manual_seed(3)
    shape = (MICROBATCHES, SEQUENCES, SEQUENCE + 1)
    data = torch.randint(0, case.vocab, shape, generator=generator)
    return data.chunk(ps.get_data_parallel_world_size())[ps.get_data_parallel_rank()]


@torch.no_grad()
def _gradients(built: Built) -> dict[str, Any]:
    """``held``, with the reduced gradients of the shards that this rank owns in place
    of state.
    """
    names = built.names
    shards = {}
    for buffer in built.buffers():
        group = buffer.data_parallel_group
        for param, (begin, end, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            size = bucket.grad_data.numel() // group.size()
            first = bucket.offset + group.rank() * size
            low = max(begin, first)
            high = min(end, first + size)
            if low < high and param.requires_grad:
                own = param.main_grad.view(-1)[low - begin : high - begin].float()
                arrays = {"grad": own.numpy().copy()}
                shards[names[id(param)]] = (low - begin, high - begin, arrays)
    return {**held(built), "shards": shards}


def train(
    case: Case, topology: Topology, mutation: Callable[[], Any] = nullcontext
) -> dict[str, Any]:
    """Losses (none before the last stage), norms, scales, and the first step's
    gradients.
    """
    with mutation():
        return _trained_here(case, topology)


def _trained_here(case: Case, topology: Topology) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    built = start(case, topology)
    _connect(built)
    chunks, optimizer = built.chunks, built.optimizer
    several = len(chunks) > 1
    batches = _batches(case)
    log: dict[str, Any] = {"losses": [], "norms": [], "scales": [], "ok": []}
    for step in range(case.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        out = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
            model=chunks if several else chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=SEQUENCES,
            forward_only=False,
        )
        if step == 0:
            log["held"] = _gradients(built)
        log["scales"].append(float(optimizer.get_loss_scale()))
        ok, norm, _ = optimizer.step()
        log["ok"].append(ok)
        if "log_interval" in dict(case.muon):
            log.setdefault("numbers", []).append(numbers(optimizer))
        log["norms"].append(norm)
        log["losses"].append(
            torch.stack([o["loss"] for o in out]).mean().item() if out else None
        )
    return log


# --- from the test's process ----------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A run put together: mean losses, norms, and the first gradients in one-process
    form.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    log: dict[str, Any]


def trained(
    case: Case, ranks: str, mutation: Callable[[], Any] = nullcontext
) -> Trained:
    """Run it on real ranks that are ``spread`` so, and check that they agree and the
    loss falls with each update.
    """
    topology = spread(ranks)
    logs = on_ranks(train, case, topology, mutation)
    first = logs[0]
    for log in logs:
        assert log["norms"] == first["norms"] and log["scales"] == first["scales"]
    last = [log["losses"] for log in logs if log["losses"][0] is not None]
    assert len(last) == topology.world_size // topology.pp
    losses = [sum(at) / len(at) for at in zip(*last, strict=True)]
    gradients = {}
    if first["ok"][0]:  # else they are infinite, which the loss scale is for
        gradients = whole([log["held"] for log in logs])["grad"]
        assert all(grad.isfinite().all() for grad in gradients.values())
    for (before, after), ok in zip(
        itertools.pairwise(losses), first["ok"], strict=False
    ):
        assert after < before if ok else after == before, losses
    return Trained(losses, first["norms"], gradients, first)


@cache
def truth(case: Case) -> Trained:
    """The same on one process."""
    return trained(case, "alltoall")


def differences(one: Trained, other: Trained) -> dict[str, float]:
    """Relative Frobenius distance of each gradient."""
    assert one.gradients.keys() == other.gradients.keys()
    return {
        name: float((other.gradients[name] - grad).norm() / grad.norm())
        for name, grad in one.gradients.items()
    }
