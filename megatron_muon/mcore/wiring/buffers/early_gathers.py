"""The all-gathers of parameters, started within the step that updates them.

With ``overlap_param_gather`` Megatron gathers a bucket group while the layers before it
are at work. It starts the first one in the forward pass, which then waits for all of
it. Here each starts as soon as the last round with one of its parameters is applied: it
travels while other rounds or experts are orthogonalized. After the last round at most
one starts (``schedule.starts``), and on a GPU with one hardware queue after any round;
Megatron starts the others. Bits are the same.

Other ranks read a rank's part of these parameters from then on. So nothing may change
them between a step and the next forward pass, as QK-Clip does. Megatron-LM's training
loop does not, and forces a gather before it reads them; other loops may do both, and
free their memory. So ``auto`` waits for that loop, and with ``on`` a step in another
one ends when all that have started have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_muon.mcore.host.process_groups import has_experts
from megatron_muon.mcore.host.shards import owned_shards
from megatron_muon.planning.schedule import ADAMW, starts
from megatron_muon.runtime.patches import replaced

# Megatron's lists of a DistributedOptimizer: model parameters, and what is copied into
# them.
_COPIED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


@dataclass(frozen=True, slots=True)
class EarlyGather:
    """The all-gather of one bucket group."""

    group: Any  # one whose errors name the phase (``bucket_groups``)
    params: frozenset[int]  # ids of its parameters
    # the round, or ``ADAMW``, after which it starts; None: in the forward pass
    after: int | None
    # (this rank's part of a parameter as it is gathered, the flat fp32 shard), where
    # there is one
    copies: Sequence[tuple[Tensor, Tensor]]

    def copy(self) -> None:
        """Round this rank's updated parameters to where they are gathered.

        Where it starts at the end of the step, Megatron does so.
        """
        for gathered, shard in self.copies:
            gathered.copy_(shard)

    def start(self) -> None:
        """Start it."""
        self.group.start_param_sync()
        self.group.is_early = True


class EarlyGathers:
    """The all-gathers of a DistributedOptimizer.

    Args:
        gathers: one of each bucket group, in the order of the forward pass.
        last: the last round of a step.
        is_on: whether they start within the step. Where they do not, Megatron's gathers
            are as they are without this.
    """

    def __init__(
        self, gathers: Sequence[EarlyGather], last: int, *, is_on: bool
    ) -> None:
        self.gathers, self.last, self.is_on = gathers, last, is_on
        self._in_loop = False  # Megatron-LM's own
        self._in_step = False
        self._started = 0  # in this step

    def applied(self, round: int) -> None:
        """Start those for which this was the round. No rank is before that round then.

        After the last round, or AdamW's part where there is none, Megatron's copies
        come first.
        """
        if round >= self.last or not self._in_step:
            return
        for gather in self._after(round):
            gather.copy()
            self._start(gather)

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """A context in which gathers start within the step, and may outlast it. At its
        end none is under way.
        """
        before, self.is_on, self._in_loop = self.is_on, True, True
        try:
            yield
            self.forget()
        finally:
            self.is_on, self._in_loop = before, False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step. At its end, unless it failed, further gathers start (``starts``)."""
        if not self.is_on:
            yield
            return
        self.finish()
        self._in_step, self._started = True, 0
        try:
            yield
            for gather in self._after(self.last):
                self._start(gather)
        finally:
            self._in_step = False

    @contextmanager
    def without_copied(self, dist_opt: Any) -> Iterator[None]:
        """Hide the parameters that travel already from Megatron's copy in a step.

        After a copy outside of a step, as of changed main parameters, all are gathered
        again.
        """
        if not self._in_step:
            self.forget()
        if not self._started:
            yield
            return
        started = self.gathers[: self._started]
        away = frozenset().union(*(gather.params for gather in started))
        copied = {}
        for models, shards in _COPIED:
            of_groups = getattr(dist_opt, models)
            stays = [[id(param) not in away for param in group] for group in of_groups]
            for name in (models, shards):
                pairs = zip(getattr(dist_opt, name), stays, strict=True)
                copied[name] = [list(compress(*pair)) for pair in pairs]
        with replaced(dist_opt, **copied):
            yield

    def end_step(self) -> None:
        """After the last optimizer's step: wait, if the loop may move parameters."""
        if self.is_on and not self._in_loop:
            self.finish()

    def finish(self) -> None:
        """Wait for the gathers that no forward pass has waited for."""
        for gather in self.gathers:
            gather.group.wait_for_params()

    def forget(self) -> None:
        """Let the next forward pass gather again: parameters have changed outside of a
        step.
        """
        may_travel = self.is_on or self._started > 0  # also after a loop that raised
        for gather in self.gathers if may_travel else ():
            gather.group.wait_for_params()
            gather.group.param_gather_dispatched = False
        self._started = 0

    def _after(self, round: int) -> Iterator[EarlyGather]:
        """Those that have not started, up to the first that waits for a later round."""
        for gather in self.gathers[self._started :]:
            if gather.after is None or gather.after > round:
                return
            yield gather

    def _start(self, gather: EarlyGather) -> None:
        self._started += 1
        gather.start()


def early_gathers(
    dist_opt: Any,
    rounds: Mapping[Any, int],
    last: int,
    *,
    one_by_one: bool,
    is_followed: bool,
    is_on: bool,
) -> EarlyGathers | None:
    """The gathers of an optimizer's bucket groups; None where it has no parameters.

    ``rounds`` are those of Muon's parameters; for other arguments see ``starts``,
    ``EarlyGathers``.
    """
    places = {}
    for buffer in dist_opt.buffers:
        for param, (start, stop, index) in buffer.param_index_map.items():
            places[param] = (buffer.buckets[index], start, stop)
    shards = dict(owned_shards(dist_opt))
    groups = list(_in_forward_order(dist_opt))
    params = [
        [param for param in places if places[param][0] in group.buckets]
        for group in groups
    ]
    updated = [
        max((rounds.get(param, ADAMW) for param in own), default=ADAMW)
        for own in params
    ]
    # fp8 is scaled over all ranks
    if dist_opt.model_chunks[0].ddp_config.fp8_param_gather:
        updated = [last] * len(groups)
    gathers = []
    after = starts(updated, last, one_by_one=one_by_one, is_followed=is_followed)
    for group, own, start in zip(groups, params, after, strict=True):
        here = [param for param in own if param in shards]
        copies = [(_own_part(group, *places[param]), shards[param]) for param in here]
        gathers.append(EarlyGather(group, frozenset(map(id, own)), start, copies))
    return EarlyGathers(gathers, last, is_on=is_on) if gathers else None


def _in_forward_order(dist_opt: Any) -> Iterator[Any]:
    """Bucket groups of an optimizer. Megatron fills buckets from the last layer on."""
    for chunk in dist_opt.model_chunks:
        dense, experts = chunk.bucket_groups, chunk.expert_parallel_bucket_groups
        yield from reversed(experts if has_experts(dist_opt) else dense)


def _own_part(group: Any, bucket: Any, start: int, stop: int) -> Tensor:
    """What this rank has of the elements ``start`` to ``stop`` of a buffer, in their
    bucket.
    """
    ranks = group.intra_distributed_optimizer_instance_group
    size = bucket.param_data.numel() // dist.get_world_size(ranks)
    low = size * dist.get_rank(ranks)
    start, stop = start - bucket.offset, stop - bucket.offset
    part: Tensor = bucket.param_data.view(-1)[max(start, low) : min(stop, low + size)]
    return part
