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

    Attributes:
        is_early: its all-gather of parameters was started by the step
            (``early_gathers``), and no forward pass has waited for it yet.
    """

    is_early = False
    param_gather_handle: Any  # Megatron's

    def start_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_REDUCTION):
            super().start_grad_sync(*args, **kwargs)

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost."""
        with self._naming(*_REDUCTION):
            super().finish_grad_sync(*args, **kwargs)

    def start_param_sync(self, force_sync: bool = False, **kwargs: Any) -> None:
        """Megatron's; raises PhaseError where a peer is lost.

        Nothing is started where a schedule asks for what the step has started, which
        Megatron would refuse (``param_sync_func``). By force all is gathered anew:
        parameters may have changed since the step sent them, and Megatron would only
        wait for what is under way.
        """
        under_way = self.param_gather_handle if self.is_early else None
        if under_way is not None and not force_sync:
            return
        self.is_early = False
        with self._naming(*_ALL_GATHER):
            if under_way is not None:
                under_way.wait()
                self.param_gather_handle = None
            super().start_param_sync(force_sync, **kwargs)

    def wait_for_params(self) -> None:
        """Wait for the parameters under way, if any; raises PhaseError where a peer is
        lost.

        As a forward pass does, which also has fp8 parameters ready for use, on every
        core.
        """
        self.is_early = False
        if self.param_gather_handle is not None:
            self.finish_param_sync(skip_next_bucket_dispatch=True)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Megatron's; raises PhaseError where a peer is lost.

        The next all-gather is not started where the step has, which Megatron would warn
        of.
        """
        self.is_early = False
        following = self.next_param_gather_bucket_group
        is_started = following is not None and following.is_early
        with self._naming(*_ALL_GATHER):
            super().finish_param_sync(skip_next_bucket_dispatch or is_started)

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
