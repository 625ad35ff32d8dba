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
from megatron_muon.runtime.patches import turn_into

# The phases of Megatron's own communication, as in traces, and what they are.
_REDUCTION = ("grads/reduce", "Megatron's reduction of gradients")
_ALL_GATHER = ("params/gather", "Megatron's all-gather of parameters")


class NamedBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """A bucket group whose errors name the phase.

    Without overlap, or in an all-gather by force, the methods that start one wait for
    it too.
    """

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_REDUCTION):
            super().start_grad_sync(*args, **kwargs)

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_REDUCTION):
            super().finish_grad_sync(*args, **kwargs)

    def start_param_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_ALL_GATHER):
            super().start_param_sync(*args, **kwargs)

    def finish_param_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_ALL_GATHER):
            super().finish_param_sync(*args, **kwargs)

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
