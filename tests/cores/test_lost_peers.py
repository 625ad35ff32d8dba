"""A rank that waits in Megatron's own communication for one that is gone says in which
phase.

gloo only: NCCL has its own watchdog, which ends the process from another thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from support.models.gpt import Built, Case, Topology, start, take_step, write_grads
from support.ranks import RankError, run
from support.runs.topologies import DP3, DP3_OVERLAP, ONE

CASE = Case(layers=2, steps=2)
FP16 = replace(CASE, bf16=False, fp16=True)


def _reduce(built: Built) -> None:
    """As a step does: with overlap the last gradient of a bucket starts its
    reduction.
    """
    built.ddp.zero_grad_buffer()
    if built.topology.overlap:
        for param in reversed(list(built.ddp.parameters())):
            built.ddp.param_to_bucket_group[param].register_grad_ready(param)
    built.ddp.finish_grad_sync()


def _start_to_reduce(built: Built) -> None:
    """As a backward pass does, in which nothing waits for the end of a reduction."""
    built.ddp.zero_grad_buffer()
    built.ddp.start_grad_sync()


def _vote(built: Built) -> None:
    write_grads(built, 1)
    built.optimizer.step()


def _after_a_kill(
    wait: Callable[[Built], None], case: Case, topology: Topology
) -> None:
    """Raises the error of this rank, whose peer dies before they meet; a peer has no
    error.
    """
    built = start(case, topology)
    take_step(built, 0)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        wait(built)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    "wait, case, topology, named",
    [
        (_reduce, CASE, DP3, "grads/reduce"),
        (_reduce, CASE, DP3_OVERLAP, "grads/reduce"),
        (_start_to_reduce, CASE, DP3, "grads/reduce"),
        (_vote, FP16, DP3, "grads/found_inf"),
        (_vote, CASE, DP3, "grads/norm"),
    ],
    ids=[
        "reduction",
        "overlapped reduction",
        "start of a reduction",
        "loss scale",
        "norm",
    ],
)
def test_survivors_of_a_killed_rank_name_the_phase_in_which_they_wait(
    wait: Callable[[Built], None], case: Case, topology: Topology, named: str
) -> None:
    with pytest.raises(RankError) as caught:
        run(_after_a_kill, 3, wait, case, topology, timeout=90.0, grace=30.0)
    text = str(caught.value)
    assert "rank 1 of 3 died" in text and "exit code -9" in text
    for rank in (0, 2):
        expected = (
            f"rank {rank} then failed: AssertionError: PhaseError: {named}: "
            f"rank {rank} of"
        )
        assert expected in text, text
    if named == "grads/reduce":
        assert (
            "did not get through Megatron's reduction of gradients. Most often" in text
        )


class _LostHandle:
    """Work of a collective whose peer is gone."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def _errors_of_lost_handles() -> dict[str, str]:
    built = start(CASE, Topology(overlap=True))
    (group, *_) = built.groups
    group.is_first_batch = (
        False  # in which newer cores start a reduction where they wait
    )
    group.grad_reduce_handle = group.param_gather_handle = _LostHandle()
    group.param_gather_dispatched = True
    return {
        "forward": _error(group.finish_param_sync),
        "by force": _error(lambda: group.start_param_sync(force_sync=True)),
        "backward": _error(group.finish_grad_sync),
    }


def _error(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error} from {type(error.__cause__).__name__}"
    return "no error"


def test_each_wait_for_parameters_and_gradients_names_itself() -> None:
    (errors,) = run(_errors_of_lost_handles, 1)
    lost = (
        "rank 0 of the group of 1 did not get through Megatron's {}. Most often "
        "another rank "
    )
    lost += (
        "was stopped or killed or raised an error: look for the first error "
        "among the ranks' "
    )
    lost += "logs (Connection closed by peer) from RuntimeError"
    gather = f"PhaseError: params/gather: {lost.format('all-gather of parameters')}"
    reduction = f"PhaseError: grads/reduce: {lost.format('reduction of gradients')}"
    assert errors == {"forward": gather, "by force": gather, "backward": reduction}


def _error_of_nan() -> str:
    built = start(CASE, ONE)
    built.ddp.ddp_config.check_for_nan_in_grad = True
    built.ddp.zero_grad_buffer()
    next(iter(built.params.values())).main_grad.fill_(float("nan"))
    return _error(built.ddp.finish_grad_sync)


def test_megatrons_error_about_gradients_stays_as_it_is() -> None:
    (error,) = run(_error_of_nan, 1)
    assert "found NaN in local grad norm" in error
    assert not error.startswith("PhaseError")


def _classes() -> dict[str, set[str]]:
    import megatron_muon

    megatron_muon.install()
    built = {
        name: start(replace(CASE, optimizer=name), ONE) for name in ("adam", "muon")
    }
    return {
        name: {type(group).__name__ for group in one.groups}
        for name, one in built.items()
    }


def test_models_of_adamw_keep_megatrons_own_classes() -> None:
    (classes,) = run(_classes, 1)
    assert classes == {
        "adam": {"_ParamAndGradBucketGroup"},
        "muon": {"NamedBucketGroup"},
    }
