"""The all-gather of the parameters that a forward pass needs first, started within the step.

With ``overlap_param_gather`` Megatron gathers a bucket group while the layers before it are at
work. It starts the first one in the forward pass, which then waits for all of it. Here it starts as
soon as the last round with one of its parameters is applied: it travels while other rounds or
experts are orthogonalized, and between two iterations. Bits are the same.

Other ranks read a rank's part of these parameters from then on. So nothing may change them between
a step and the next forward pass, as QK-Clip does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_muon.config import MuonConfig
from megatron_muon.mcore.process_groups import has_experts
from megatron_muon.mcore.shards import owned_shards
from megatron_muon.runtime.optimizer import ADAMW
from megatron_muon.runtime.patches import replaced
from megatron_muon.setting_names import named

# Megatron's lists of a DistributedOptimizer: model parameters, and what is copied into them.
_COPIED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


class EarlyGather:
    """The all-gather of one bucket group of a DistributedOptimizer.

    Args:
        group: the bucket group, one whose errors name the phase (``named``).
        params: its parameters.
        round: the round of Muon's that updates the last of them (``ADAMW``: none does); None: its
            copies are Megatron's, and it starts after these.
        copies: (this rank's part of a parameter as it is gathered, the flat fp32 shard) for each
            parameter of which it has one.
    """

    def __init__(
        self,
        group: Any,
        params: Sequence[torch.nn.Parameter],
        round: int | None,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.group, self.round = group, round
        group.is_early = True
        self._ids = {id(param) for param in params}
        self._copies = copies
        self._in_step = self._is_started = False

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters on every rank, with padding."""
        return sum(bucket.param_data.nbytes for bucket in self.group.buckets)

    def applied(self, round: int) -> None:
        """Start it if this was the round for which it waits. No rank is before that round then."""
        if round != self.round:
            return
        for gathered, shard in self._copies:
            gathered.copy_(shard)
        self._start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, after which it has started unless the step failed."""
        self.finish()
        self._in_step, self._is_started = True, False
        try:
            yield
            if not self._is_started:
                self._start()
        finally:
            self._in_step = False

    @contextmanager
    def without_copied(self, dist_opt: Any) -> Iterator[None]:
        """Hide its parameters from Megatron's copy of a step in which they travel already.

        After another copy, as of main parameters that were changed, all are gathered again.
        """
        if not self._in_step:
            self.forget()
        if not (self._in_step and self._is_started):
            yield
            return
        left = {}
        for models, shards in _COPIED:
            pairs = [
                [(model, shard) for model, shard in zip(*both, strict=True) if not self._has(model)]
                for both in zip(getattr(dist_opt, models), getattr(dist_opt, shards), strict=True)
            ]
            left[models] = [[model for model, _ in group] for group in pairs]
            left[shards] = [[shard for _, shard in group] for group in pairs]
        with replaced(dist_opt, **left):
            yield

    def finish(self) -> None:
        """Wait for it if no forward pass has."""
        if self.group.param_gather_handle is not None:
            self.group.start_param_sync(force_sync=True)

    def forget(self) -> None:
        """Let the next forward pass gather again: the parameters have changed outside of a step."""
        self.finish()
        self.group.param_gather_dispatched = False

    def _start(self) -> None:
        self._is_started = True
        self.group.start_param_sync()

    def _has(self, param: torch.nn.Parameter) -> bool:
        return id(param) in self._ids


def early_gather(dist_opt: Any, rounds: Mapping[Any, int], last: int) -> EarlyGather | None:
    """The gather of the first bucket group of an optimizer; None where it has no parameters.

    Args:
        dist_opt: Megatron's DistributedOptimizer.
        rounds: the round of each of Muon's parameters.
        last: the last round of the plan.
    """
    chunk = dist_opt.model_chunks[0]
    groups = chunk.expert_parallel_bucket_groups if has_experts(dist_opt) else chunk.bucket_groups
    places = {
        param: (buffer.buckets[index], start, stop)
        for buffer in dist_opt.buffers
        for param, (start, stop, index) in buffer.param_index_map.items()
    }
    first = next((param for param in chunk.parameters() if param in places), None)
    if first is None:
        return None
    group = next(one for one in groups if places[first][0] in one.buckets)
    params = [param for param, place in places.items() if place[0] in group.buckets]
    round = max((rounds[param] for param in params if param in rounds), default=ADAMW)
    if round >= last or chunk.ddp_config.fp8_param_gather:  # fp8 is scaled over all ranks
        return EarlyGather(group, params, None, ())
    shards = dict(owned_shards(dist_opt))
    copies = [
        (_own_part(group, *places[param]), shards[param]) for param in params if param in shards
    ]
    return EarlyGather(group, params, round, copies)


def _own_part(group: Any, bucket: Any, start: int, stop: int) -> torch.Tensor:
    """What this rank has of the elements ``start`` to ``stop`` of a buffer, in their bucket."""
    ranks = group.intra_distributed_optimizer_instance_group
    size = bucket.param_data.numel() // dist.get_world_size(ranks)
    low = size * dist.get_rank(ranks)
    start, stop = start - bucket.offset, stop - bucket.offset
    part: torch.Tensor = bucket.param_data.view(-1)[max(start, low) : min(stop, low + size)]
    return part


def require_early_gather(
    config: MuonConfig, optimizer_config: Any, model_chunks: Sequence[Any]
) -> None:
    """Check that a gather may start within the step.

    Raises:
        ValueError: Megatron gathers after the step, or starts this gather by itself.
        NotImplementedError: parameters change between the step and the gather.
    """
    if not config.early_param_gather:
        return
    setting, ddp = named("early_param_gather"), model_chunks[0].ddp_config
    if not ddp.overlap_param_gather:
        raise ValueError(
            f"{setting} starts the first gather of overlap_param_gather (--overlap-param-gather), "
            "which is off: set it, or leave this out"
        )
    others = {
        "align_param_gather": ddp.align_param_gather,
        "overlap_param_gather_with_optimizer_step": (
            optimizer_config.overlap_param_gather_with_optimizer_step
        ),
    }
    for name, is_on in others.items():
        if is_on:
            raise ValueError(
                f"{setting} with {name} (--{name.replace('_', '-')}): both start the first "
                "gather: leave out one of both"
            )
    model = get_model_config(model_chunks[0])
    graph = f"{getattr(model, 'cuda_graph_impl', '')} {getattr(model, 'cuda_graph_scope', '')}"
    if "full_iteration" in graph:
        raise NotImplementedError(
            f"{setting} with a CUDA graph of the full iteration (--cuda-graph-impl, "
            "--cuda-graph-scope): the graph would wait for a gather outside of it: leave out one "
            "of both"
        )
    if config.qk_clip is not None or getattr(model, "qk_clip", False):
        raise NotImplementedError(
            f"{setting} with clipped attention logits (--qk-clip, --muon-qk-clip): weights are "
            "gathered before they are clipped: leave out one of both"
        )
