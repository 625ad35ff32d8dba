"""Bucket groups whose errors name the phase: the reduction of gradients, or the
all-gather of parameters.

A rank that waits there for one that is gone gets gloo's error, which has the peer's
address and no phase. In a model that Muon trains the bucket groups get a subclass that
adds the phase. NCCL raises nothing there: its watchdog ends the process from another
thread.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_muon.runtime.collectives import naming
from megatron_muon.runtime.patches import Function, turn_into


def _named(method: str, phase: str, what: str) -> Function:
    """One of a bucket group's methods, which raises PhaseError where a peer is lost."""

    def call(self: NamedBucketGroup, *args: Any, **kwargs: Any) -> None:
        with self._naming(phase, what):
            getattr(super(NamedBucketGroup, self), method)(*args, **kwargs)

    return call


class NamedBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """A bucket group whose errors name the phase, as traces do.

    Without overlap, or in an all-gather by force, the methods that start one wait for
    it too.
    """

    _REDUCTION = ("grads/reduce", "Megatron's reduction of gradients")
    start_grad_sync = _named("start_grad_sync", *_REDUCTION)
    finish_grad_sync = _named("finish_grad_sync", *_REDUCTION)
    _ALL_GATHER = ("params/gather", "Megatron's all-gather of parameters")
    start_param_sync = _named("start_param_sync", *_ALL_GATHER)
    finish_param_sync = _named("finish_param_sync", *_ALL_GATHER)

    @contextmanager
    def _naming(self, name: str, what: str) -> Iterator[None]:
        """``naming``, but not of an error of Megatron's check of gradients, which is in
        ``start_grad_sync``, too.
        """
        try:
            yield
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            if any(frame.name == "check_grads" for frame in frames):
                raise
            with naming(name, self.intra_distributed_optimizer_instance_group, what):
                raise


def name_phases(model_chunks: Iterable[Any]) -> None:
    """Have the errors of a model's bucket groups name the phase."""
    for chunk in model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            turn_into(group, NamedBucketGroup)


def finish_gathers(model_chunks: Iterable[Any]) -> None:
    """Wait for a model's parameters after a step, as its forward pass does."""
    for chunk in model_chunks:
        if chunk.ddp_config.overlap_param_gather:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)
